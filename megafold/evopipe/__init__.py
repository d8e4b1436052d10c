"""EvoPipe: deterministic preprocessing, cached once in HDF5; cropping and augmentation in the training loop."""
