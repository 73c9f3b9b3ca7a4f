// C++ stand-in for the subset of the Metal Shading Language that compute kernels use.
#pragma once
#include "emu_attributes.h"
