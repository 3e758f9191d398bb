"""The engine process of the server, except that its sessions are forced."""
