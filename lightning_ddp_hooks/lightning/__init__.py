"""What ties a training run to Lightning: the strategies of Trainer and Fabric, callbacks, checkpoint files, messages."""
