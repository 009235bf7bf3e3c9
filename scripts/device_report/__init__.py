"""Report for a user with a device: figures of a target alone and with its draft, one after the other.

It starts servers by main.py, and lets `comparison` measure each as an endpoint. It adds the tables of docs/tutorials,
and an archive to send with a bug report. Start reading: `__main__.py`.
"""
