ARG BASE_IMAGE
FROM ${BASE_IMAGE}
COPY prometheus /usr/bin/prometheus
USER 65532:65532
ENTRYPOINT ["/usr/bin/prometheus"]
