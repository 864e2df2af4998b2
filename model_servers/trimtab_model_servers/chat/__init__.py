"""Chat models with or without images, as a replica serves them.

``chat_model`` serves a generation model, ``encoder_model`` an image encoder alone. ``request_parser`` parses tensors,
``sessions`` runs chats in the engine, ``responses`` builds tensors and server-sent events.
``encoder_scheduler`` encodes and caches images; ``embedding_store`` stores embeddings for other replicas, which fetch
them by ``embedding_client``, and tracks images that are encoded elsewhere.
"""
