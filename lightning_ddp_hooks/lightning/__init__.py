"""What ties the package to Lightning: strategies, callbacks, and how a Trainer runs uneven inputs."""
