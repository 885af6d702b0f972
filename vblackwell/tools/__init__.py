"""Commands in addition to training and writing: doctor, bench, quantize, what fits; and `compare`."""
