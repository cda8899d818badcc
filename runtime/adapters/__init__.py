"""The runtime's ends of its ports: the control plane, the model, and this process's memory."""
