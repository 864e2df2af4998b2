"""Dashboard of pipelines that serve chats: token latencies, prompts, images and replica caches."""

from trimtab_pipelines import router_metrics as names
from trimtab_pipelines.rendering.dashboards.panels import Panel, R, S, mean, quantile, zero

IMAGE_CHATS = f'{S},modality="image"'


def _rate(metric: str) -> str:
    return f"sum by (stage) (rate({metric}{{{S}}}[{R}]))"


def _each(metric: str, of: str) -> str:
    """Amount of one metric per unit of another; absent if the other is 0."""
    return f"{_rate(metric)} / ({_rate(of)} > 0)"


def _share(metric: str, other: str) -> str:
    """Share of one metric in the sum of two; absent if both are 0."""
    return f"{_rate(metric)} / (({_rate(metric)} + {_rate(other)}) > 0)"


CHATS = (
    Panel(
        "Time to first token",
        "From a chat's arrival to its first token (TTFT), with and without images.",
        "s",
        {
            "p50 {{modality}}": quantile(0.5, names.TTFT_SECONDS, "modality"),
            "p99 {{modality}}": quantile(0.99, names.TTFT_SECONDS, "modality"),
        },
    ),
    Panel(
        "Time between tokens",
        "Between two tokens of a response (TBT).",
        "s",
        {
            "p50 {{modality}}": quantile(0.5, names.TBT_SECONDS, "modality"),
            "p99 {{modality}}": quantile(0.99, names.TBT_SECONDS, "modality"),
        },
    ),
    Panel(
        "Chats by outcome",
        "Late includes responses that began late or were streamed too slowly; outcomes add up to all received chats.",
        "reqps",
        {"{{outcome}}": f"sum by (outcome) (rate({names.REQUESTS}{{{S}}}[{R}]))"},
    ),
    Panel(
        "Tokens per second",
        "Tokens of prompts (in) and responses (out), with and without images.",
        "short",
        {"{{modality}} {{direction}}": f"sum by (modality, direction) (rate({names.TOKENS}{{{S}}}[{R}]))"},
    ),
    Panel(
        "Images per chat",
        "Mean and 99th percentile, of chats with images.",
        "short",
        {"mean": mean(names.IMAGES, of=IMAGE_CHATS), "p99": quantile(0.99, names.IMAGES, of=IMAGE_CHATS)},
    ),
    Panel(
        "Queued rows and replicas",
        "By stage. Rows of a generation stage are queued only while all KV slots are used.",
        "short",
        {
            "{{stage}} rows": f"sum by (stage) (trimtab_queue_rows{{{S}}})",
            "{{stage}} replicas": f"min by (stage) (trimtab_ready_replicas{{{S}}})",
        },
    ),
    Panel(
        "Deduplicated images",
        "Images per second that joined an in-flight encoding, or were found in a replica's cache.",
        "ops",
        {
            "{{stage}} {{source}}": zero(
                f"sum by (stage, source) (rate({names.ENCODER_DEDUP}{{{S}}}[{R}]))", stage="no stage", source="none"
            )
        },
    ),
    Panel(
        "Early prefills",
        "Chats per second whose prefill started before all of their images were encoded.",
        "ops",
        {"{{stage}}": f"sum by (stage) (rate({names.EARLY_PREFILLS}{{{S}}}[{R}]))"},
    ),
    Panel(
        "Cancelled rows",
        "Rows per second whose client disconnected during generation.",
        "ops",
        {"{{stage}}": f"sum by (stage) (rate({names.CANCELLED_ROWS}{{{S}}}[{R}]))"},
    ),
    Panel(
        "Pending prefill tokens",
        "Text and image tokens that the stage's replicas have yet to process.",
        "short",
        {
            "{{stage}} {{kind}}": zero(
                f"sum by (stage, kind) (trimtab_pending_prefill_tokens{{{S}}})", stage="no stage", kind="none"
            )
        },
    ),
    Panel(
        "KV slots used",
        "Share of the KV cache slots of the stage's replicas. At 100 % chats are queued in their replicas.",
        "percentunit",
        {
            "{{stage}}": zero(
                f"sum by (stage) (trimtab_kv_slots_used{{{S}}}) / (sum by (stage) (trimtab_kv_slots{{{S}}}) > 0)",
                stage="no stage",
            )
        },
    ),
    Panel(
        "Stored embeddings",
        "Embeddings stored by the stage's replicas, for chats or to be pulled.",
        "bytes",
        {"{{stage}}": zero(f"sum by (stage) (trimtab_embedding_bytes{{{S}}})", stage="no stage")},
    ),
    Panel(
        "Embedding cache hit rate",
        "Share of images that a replica had encoded, or was encoding, for the same tenant.",
        "percentunit",
        {
            "{{stage}}": zero(
                _share("trimtab_embedding_cache_hits_total", "trimtab_embedding_cache_misses_total"), stage="no stage"
            )
        },
    ),
    Panel(
        "Encoding time",
        "Mean encoding time of an image in seconds.",
        "s",
        {"{{stage}}": zero(_each("trimtab_encode_seconds_total", "trimtab_encoded_images_total"), stage="no stage")},
    ),
    Panel(
        "Embedding transfer rate",
        "Bytes per second while embeddings are pulled.",
        "Bps",
        {
            "{{stage}}": zero(
                _each("trimtab_embedding_transfer_bytes_total", "trimtab_embedding_transfer_seconds_total"),
                stage="no stage",
            )
        },
    ),
)
