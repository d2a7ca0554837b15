"""What ties a training run to Lightning: the strategies of Trainer and Fabric, their checkpoint files and messages."""
