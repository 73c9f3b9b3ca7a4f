"""Draws calibration-knee.png and calibration-dear.png: plots of two scripted machines.

    uv run --all-packages python docs/images/calibration.py

The machines are those of `spec_calibrate.scenarios`; their times are made up, so the pictures show
how to read a plot, not how fast anything is. `spec calibrate --plot FILE` draws the same three
panels from measurements.
"""

from pathlib import Path

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
