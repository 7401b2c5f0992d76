"""Worker processes are forks of one that has imported torch and Ray already: they start at once, and share its pages.

See NOTE [fork server] in owner.py.
"""
