// The runtime, one object that is never instrumented and is linked to every kernel.
#include "emu_fibers.h"
#include "emu_check.h"
#include "emu_launch.h"
