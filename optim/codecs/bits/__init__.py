"""Building blocks of the wire formats: selecting, fitting, packing and entropy-coding of values."""
