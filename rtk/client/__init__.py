"""The HTTP path to one inference server: what is sent, what is sent again, and how an answer is read.

Nothing is repaired: what a server's form of answer does not promise is a PayloadError.
"""
