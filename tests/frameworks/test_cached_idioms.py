"""The idioms of docs/howto/cache.md: bit for bit the batches without the cache, of forks and of actors."""

import importlib.util

import pytest

import cached_idioms
import rayloader

pytestmark = [
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("default"),  # what the libraries warn of is their own matter
]
full = pytest.mark.full
OF_THE_FULL_TESTS = [pytest.param(idiom, marks=full) for idiom in cached_idioms.IDIOMS if idiom != "albumentations"]


@pytest.mark.parametrize("workers", ["fork", "ray"])
@pytest.mark.parametrize("idiom", ["albumentations", *OF_THE_FULL_TESTS])
def test_batches_are_those_without_the_cache(idiom, workers, tmp_path, monkeypatch):
    if importlib.util.find_spec(idiom) is None:
        pytest.skip(f"{idiom} is not installed")
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path / "settings"))
    folder = cached_idioms.write_pictures(tmp_path)
    caches, found = [], []

    def cache(dataset):
        caches.append(rayloader.cached(dataset))
        return caches[-1]

    for how in (cached_idioms.nothing, cache):
        dataset = cached_idioms.IDIOMS[idiom](folder, how)
        collate = getattr(dataset, "collate_fn", None)
        options = {"num_workers": 2, "workers": workers, "shuffle": True, "collate_fn": collate}
        found.append(cached_idioms.epochs(rayloader.DataLoader(dataset, 3, **options)))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1], "the transforms are random"
    (kept,) = caches
    assert kept.stats().present == cached_idioms.COUNT
    assert kept.stats().hits > 0
