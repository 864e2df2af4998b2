"""Chats as OpenAI's API writes them, on one side, and as model servers read them (decision 41), on the other.

``reading`` reads a body: ``lifting`` takes images out of it before it is read as JSON, ``asking`` reads what is asked,
``images`` looks at files by their headers; ``addresses`` says which images may be fetched; ``answering`` writes
answers; ``inner`` is what travels to a model server and what it answers.
"""
