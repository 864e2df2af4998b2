"""A pipeline that two variants could serve, on a real API server."""

import pytest

from tests.builders import a_pipeline_document, a_stage, a_variant
from tests.operator_.scene import Site
from trimtab_kubernetes import Cluster


@pytest.fixture
def site(cluster: Cluster, namespace: str) -> Site:
    """A pipeline of one stage with two variants, each hosted by itself."""
    variants = [a_variant("small"), a_variant("large", accuracy=0.95)]
    return Site(cluster, namespace, a_pipeline_document([a_stage(variants=variants, variantPlacement="Dedicated")]))
