"""`ParquetStream` over S3, as a server on this machine has it; its package is there for `make test-full` alone."""

import itertools
import logging

import pyarrow as pa
import pytest
from pyarrow import fs, parquet
from torch.utils.data import DataLoader as TorchDataLoader

import rayloader
from rayloader import DataLoader, ParquetStream

pytestmark = [
    pytest.mark.full,
    pytest.mark.usefixtures("ray_session"),
    pytest.mark.filterwarnings("default"),  # what the server's packages warn of is their own matter
]
ROWS = 300
KEYS = {"access_key": "name", "secret_key": "secret"}


@pytest.fixture(scope="module")
def endpoint():
    """Where a server of S3 listens that has three files of five row groups each."""
    server_module = pytest.importorskip("moto.server", reason="there is no server of S3: pip install moto[server]")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "{}:{}".format(*server.get_host_and_port())
        s3 = filesystem_at(endpoint)
        s3.create_dir("bucket")
        for number in range(3):
            table = pa.table({"i": range(100 * number, 100 * number + 100)})
            parquet.write_table(table, f"bucket/data/{number}.parquet", row_group_size=20, filesystem=s3)
        yield endpoint
    finally:
        server.stop()


def filesystem_at(endpoint):
    options = {"endpoint_override": endpoint, "scheme": "http", "region": "us-east-1", "allow_bucket_creation": True}
    return fs.S3FileSystem(**KEYS, **options)


def stream_at(endpoint):
    """Of a URI, which only workers open."""
    host, port = endpoint.split(":")
    options = f"endpoint_override={host}%3A{port}&scheme=http&region=us-east-1"
    return ParquetStream("s3://{access_key}:{secret_key}@bucket/data?".format(**KEYS) + options, shuffle_buffer=10)


def numbers(batches):
    return [batch["i"].tolist() for batch in batches]


@pytest.mark.parametrize("workers", ["fork", "ray"])
def test_a_uri_is_read_and_an_epoch_continued(endpoint, workers):
    options = {"num_workers": 2, "workers": workers}
    loader = DataLoader(stream_at(endpoint), 16, **options)
    iterator = iter(loader)
    head = numbers(itertools.islice(iterator, 4))
    state = loader.state_dict()
    rest = numbers(iterator)
    assert sorted(itertools.chain(*head, *rest)) == list(range(ROWS))
    assert head + rest == numbers(TorchDataLoader(stream_at(endpoint), 16, num_workers=2))
    resumed = DataLoader(stream_at(endpoint), 16, **options)
    resumed.load_state_dict(state)
    assert numbers(resumed) == rest


def test_a_filesystem_that_was_used_needs_actors(endpoint):
    stream = ParquetStream("bucket/data", filesystem=filesystem_at(endpoint))
    batches = numbers(DataLoader(stream, 16, num_workers=2, workers="ray"))
    assert sorted(itertools.chain(*batches)) == list(range(ROWS))
    with pytest.raises(rayloader.RayloaderError, match='does not survive a fork; use workers="ray"'):
        next(iter(DataLoader(stream, 16, num_workers=2, workers="fork")))


def test_a_file_that_is_not_there_comes_with_the_first_batch(endpoint):
    stream = ParquetStream(stream_at(endpoint)._paths[0].replace("/data", "/lost"))
    with pytest.raises(FileNotFoundError, match="there is no file or folder bucket/lost for a ParquetStream"):
        next(iter(DataLoader(stream, 16, num_workers=1, workers="fork")))
