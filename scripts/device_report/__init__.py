"""Report for a user with a device: figures of the target alone and of a fused pair, one after the other.

Starts servers by main.py and lets `comparison` measure each as an endpoint. Adds the table of docs/tutorials and the
bundle to send with a bug report. Start reading: `__main__.py`.
"""
