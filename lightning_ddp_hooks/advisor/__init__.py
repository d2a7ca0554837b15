"""What a step would take with each hook, predicted from measured parts; and what to choose. Pure."""
