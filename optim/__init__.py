"""The training methods: tensors in, tensors out; knows no socket, no clock, no file."""
