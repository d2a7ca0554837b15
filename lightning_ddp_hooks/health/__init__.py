"""Whether all ranks are alive, alike and finite."""
