"""Compression inside frameworks that wrap models themselves. Importing a module here imports its framework.

    commhooks.integrations.lightning         CompressGradients, a Callback for the Trainer
    commhooks.integrations.lightning_diloco  TrainWithDiLoCo, a Callback, and DiLoCoStrategy
    commhooks.integrations.fabric            compress, after Fabric.setup
    commhooks.integrations.accelerate        compress, after Accelerator.prepare
    commhooks.integrations.transformers      CompressGradients, a TrainerCallback
    commhooks.integrations.ray               compress, after ray.train.torch.prepare_model
    commhooks.integrations.torchft           compress, with the Manager of the replicas

Each keeps the hook's state in the framework's own checkpoint, and raises `NotAveragedError` if an optimizer
steps on gradients that did not pass through the compressor, or if DiLoCo's training ends without a round.
"""
