"""What inference servers are asked and how they answer.

`forms` has one class a form of request and answer, `routes` decodes routed experts, `body` reads JSON without
copying what is large in it. Nothing here does any I/O, and nothing is repaired: what a form does not promise is
a PayloadError.
"""
