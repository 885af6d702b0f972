"""Commands next to training and writing: doctor, bench, quantize, calibrate, compare."""
