"""OpenAI chat API for clients, and its internal form between router and model servers (decision 41).

``chat_parser`` parses a request body: ``data_urls`` extracts images before the JSON is parsed, ``openai_requests``
parses the fields, and ``image_header`` checks image files. ``image_urls`` decides which images may be fetched.
``openai_responses`` encodes responses. ``internal_wire`` and ``embedding_refs`` are the internal form, and
``openai_backend`` translates it for engines that implement the OpenAI API.
"""
