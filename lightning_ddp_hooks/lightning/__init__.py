"""What ties a run to Lightning: the strategies of Trainer and Fabric, callbacks, checkpoint files and messages."""
