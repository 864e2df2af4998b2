"""Pipelines that answer chats: when answers begin, how they go on, what they are made of, what replicas hold. Pure."""

from trimtab_pipelines import router_metrics as names
from trimtab_pipelines.rendering.dashboards.panels import Panel, R, S, mean, quantile, zero

IMAGE_CHATS = f'{S},modality="image"'


def _rate(metric: str) -> str:
    return f"sum by (stage) (rate({metric}{{{S}}}[{R}]))"


def _each(metric: str, of: str) -> str:
    """How much of one there was for each of another; nothing while there was none."""
    return f"{_rate(metric)} / ({_rate(of)} > 0)"


def _share(metric: str, other: str) -> str:
    """The share of one in both; nothing while there was neither."""
    return f"{_rate(metric)} / (({_rate(metric)} + {_rate(other)}) > 0)"


CHATS = (
    Panel(
        "First words",
        "From a chat's arrival to the first piece of its answer, with images and without.",
        "s",
        {
            "p50 {{modality}}": quantile(0.5, names.TTFT_SECONDS, "modality"),
            "p99 {{modality}}": quantile(0.99, names.TTFT_SECONDS, "modality"),
        },
    ),
    Panel(
        "Between words",
        "From one piece of an answer to the next.",
        "s",
        {
            "p50 {{modality}}": quantile(0.5, names.TBT_SECONDS, "modality"),
            "p99 {{modality}}": quantile(0.99, names.TBT_SECONDS, "modality"),
        },
    ),
    Panel(
        "Chats by outcome",
        "Late are those whose answers began late or went on too slowly, too; all ends add up to what arrived.",
        "reqps",
        {"{{outcome}}": f"sum by (outcome) (rate({names.REQUESTS}{{{S}}}[{R}]))"},
    ),
    Panel(
        "Tokens a second",
        "Of prompts (in) and answers (out), of chats with images and without.",
        "short",
        {"{{modality}} {{direction}}": f"sum by (modality, direction) (rate({names.TOKENS}{{{S}}}[{R}]))"},
    ),
    Panel(
        "Images a chat",
        "Of chats that show any: the mean, and the 99th percentile.",
        "short",
        {
            "mean": mean(names.IMAGES, of=IMAGE_CHATS),
            "p99": quantile(0.99, names.IMAGES, of=IMAGE_CHATS),
        },
    ),
    Panel(
        "Rows that wait, and replicas",
        "By stage. Rows wait for who writes only while all of its slots are taken.",
        "short",
        {
            "{{stage}} rows": f"sum by (stage) (trimtab_queue_rows{{{S}}})",
            "{{stage}} replicas": f"min by (stage) (trimtab_ready_replicas{{{S}}})",
        },
    ),
    Panel(
        "Images not encoded again",
        "Images a second that rode along with another chat's, or were found where they had been encoded.",
        "ops",
        {
            "{{stage}} {{source}}": zero(
                f"sum by (stage, source) (rate({names.ENCODER_DEDUP}{{{S}}}[{R}]))", stage="no stage", source="none"
            )
        },
    ),
    Panel(
        "Chats that began on their first images",
        "A second; the others of their images were still being encoded.",
        "ops",
        {"{{stage}}": f"sum by (stage) (rate({names.EARLY_PREFILLS}{{{S}}}[{R}]))"},
    ),
    Panel(
        "Callers who hung up",
        "Rows a second that nobody waited for any more while they were being written.",
        "ops",
        {"{{stage}}": f"sum by (stage) (rate({names.CANCELLED_ROWS}{{{S}}}[{R}]))"},
    ),
    Panel(
        "Tokens still to be computed",
        "Held by the stage's replicas: of words, and of images that are still to be encoded.",
        "short",
        {
            "{{stage}} {{kind}}": zero(
                f"sum by (stage, kind) (trimtab_pending_prefill_tokens{{{S}}})", stage="no stage", kind="none"
            )
        },
    ),
    Panel(
        "Slots given away",
        "Of those that all replicas of the stage have for keys and values. At 100 % chats wait in their replicas.",
        "percentunit",
        {
            "{{stage}}": zero(
                f"sum by (stage) (trimtab_kv_slots_used{{{S}}}) / (sum by (stage) (trimtab_kv_slots{{{S}}}) > 0)",
                stage="no stage",
            )
        },
    ),
    Panel(
        "Embeddings held",
        "By the stage's replicas: for chats, or to be pulled.",
        "bytes",
        {"{{stage}}": zero(f"sum by (stage) (trimtab_embedding_bytes{{{S}}})", stage="no stage")},
    ),
    Panel(
        "Images that a replica had",
        "Of those it was shown: encoded, or being encoded, for the same tenant already.",
        "percentunit",
        {
            "{{stage}}": zero(
                _share("trimtab_embedding_cache_hits_total", "trimtab_embedding_cache_misses_total"), stage="no stage"
            )
        },
    ),
    Panel(
        "Encoding an image",
        "Seconds of the stage's replicas that each took on average.",
        "s",
        {"{{stage}}": zero(_each("trimtab_encode_seconds_total", "trimtab_encoded_images_total"), stage="no stage")},
    ),
    Panel(
        "Pulling embeddings",
        "Bytes a second, while any were pulled.",
        "Bps",
        {
            "{{stage}}": zero(
                _each("trimtab_embedding_transfer_bytes_total", "trimtab_embedding_transfer_seconds_total"),
                stage="no stage",
            )
        },
    ),
)
