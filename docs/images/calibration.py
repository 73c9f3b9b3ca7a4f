"""Draws calibration-knee.png and calibration-dear.png: plots of two scripted machines.

    uv run --all-packages python docs/images/calibration.py [PLOT TO MAKE SMALLER ..]

The machines are those of `spec_calibrate.scenarios`; their times are made up, so the pictures show
how to read a plot, not how fast anything is. `spec calibrate --plot FILE` draws the same three
panels from measurements; such a file can be named to be stored with as few colours as these.
"""

import sys
from pathlib import Path

from PIL import Image

from spec_calibrate.plot import save_plot
from spec_calibrate.scenarios import DEAR, KNEE

FOLDER = Path(__file__).parent
PLOTS = {
    "calibration-knee.png": (KNEE, "a scripted machine whose verify bends at some width"),
    "calibration-dear.png": (DEAR, "a scripted machine and a drafter that is dear"),
}

if __name__ == "__main__":
    for name, (machine, title) in PLOTS.items():
        save_plot(machine.curves(8), FOLDER / name, title=title)
    for path in [*(FOLDER / name for name in PLOTS), *map(Path, sys.argv[1:])]:
        Image.open(path).convert("RGB").quantize(48).save(path, optimize=True)
