"""The bucketed gradient reducer: layout (pure), storage, hot path, agreement between ranks."""
