FROM scratch
COPY minio /minio
USER 65532:65532
ENTRYPOINT ["/minio"]
CMD ["server", "/data"]
