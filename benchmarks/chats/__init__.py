"""What a replica that answers chats holds to: cancels given back, images encoded once, embeddings pulled fast."""
