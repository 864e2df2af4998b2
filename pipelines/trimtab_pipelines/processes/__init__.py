"""Programs of ours that run as processes of their own: how one is started, tied to who starts it, read and stopped."""
