"""Datasets of libraries that train: what their trainers, samplers and transforms need, made as their guides show."""

from __future__ import annotations

import functools
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import vision_operators  # isort: skip  # noqa: F401 (before torchvision, which some of these import)
import numpy as np
import torch
from torch.utils.data import TensorDataset

from client_jobs import BATCH_SIZE, SIDE, Job


def mmengine(job: Job) -> Any:
    """A `BaseDataset` of an annotation file, whose loader `Runner` makes by torch's name."""
    from mmengine.dataset import BaseDataset
    from mmengine.runner import Runner

    def write(path: Path) -> None:
        records = [{"img_path": f"{index:05}.png", "label": index % 4} for index in range(job.count)]
        path.write_text(json.dumps({"metainfo": {"classes": ["a", "b", "c", "d"]}, "data_list": records}))

    dataset = BaseDataset(str(job.written("annotations.json", write)), data_prefix={"img_path": "pictures"})
    sampler = {"type": "DefaultSampler", "shuffle": True}
    return Runner.build_dataloader(
        {"dataset": dataset, "sampler": sampler, "batch_size": BATCH_SIZE, **job.options}, seed=1
    )


def trl(job: Job) -> Any:
    """The loader of an `SFTTrainer` that trains an adapter of PEFT's; Accelerate prepares it."""
    import datasets
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = ["<pad>", "</s>", "<unk>", *(f"w{number}" for number in range(61))]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    texts = [" ".join(words[3 + (index * n) % 61] for n in range(4 + index % 12)) for index in range(job.count)]
    options = {f"dataloader_{name}": value for name, value in job.options.items()}
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        SFTConfig(
            str(job.folder / "trained"),
            per_device_train_batch_size=BATCH_SIZE,
            use_cpu=True,
            bf16=False,
            report_to=[],
            **options,
        ),
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
        ),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    )
    trainer.data_collator = functools.partial(collated, trainer.data_collator)
    return trainer.get_train_dataloader()


def collated(collator: Any, features: list[Any]) -> Any:
    """What the collator gives; by this function's module, a worker declares torchvision's operators first."""
    return collator(features)


def darts(job: Job) -> Any:
    """Windows of a time series and its covariates."""
    from darts import TimeSeries
    from darts.utils.data import SequentialTorchTrainingDataset
    from darts.utils.data.torch_datasets.utils import _batch_collate_fn_train

    values = np.random.default_rng(0).random((job.count + 35, 3), dtype=np.float32)
    series, covariates = TimeSeries.from_values(values[:, :1]), TimeSeries.from_values(values[:, 1:])
    windows = SequentialTorchTrainingDataset(
        series, past_covariates=covariates, input_chunk_length=24, output_chunk_length=12
    )
    return job.load(windows, shuffle=True, collate_fn=_batch_collate_fn_train)


def torchgeo(job: Job) -> Any:
    """A `RasterDataset`, with a sampler of places and periods."""
    import rasterio
    from torchgeo.datasets import stack_samples
    from torchgeo.samplers import RandomGeoSampler

    from client_torchgeo import Rasters

    def write(path: Path) -> None:
        path.mkdir()
        for number in range(2):
            place = rasterio.transform.from_origin(500_000 + 2560 * number, 5_000_000, 10, 10)
            pixels = np.random.default_rng(number).integers(256, size=(3, 256, 256), dtype=np.uint8)
            profile = {"width": 256, "height": 256, "count": 3, "dtype": "uint8", "crs": "EPSG:32633"}
            with rasterio.open(path / f"{number}.tif", "w", driver="GTiff", transform=place, **profile) as file:
                file.write(pixels)

    rasters = Rasters(str(job.written("rasters", write)))
    return job.load(rasters, sampler=RandomGeoSampler(rasters, SIDE, job.count), collate_fn=stack_samples)


def lightly(job: Job) -> Any:
    """A `LightlyDataset`, which gives views of each picture."""
    from client_lightly import SimCLRTransform, Views

    return job.load(Views(str(job.folder / "pictures"), transform=SimCLRTransform(input_size=32)), shuffle=True)


def energon(job: Job) -> Any:
    """Pictures in a prepared shard, and Energon's own loader."""
    from megatron import energon
    from megatron.energon.flavors import BaseWebdatasetFactory

    def write(path: Path) -> None:
        (path / ".nv-meta").mkdir(parents=True)
        with tarfile.open(path / "shard.tar", "w") as shard:
            for index, picture in enumerate(sorted((job.folder / "pictures").rglob("*.png"))):
                shard.add(picture, f"{index:05}.png")
                label = tarfile.TarInfo(f"{index:05}.cls")
                label.size = 1
                shard.addfile(label, io.BytesIO(b"%d" % (index % 4)))
        BaseWebdatasetFactory.prepare_dataset(path, ["shard.tar"], split_parts_ratio=[("train", 1.0)], workers=1)
        sample = {"__module__": "megatron.energon", "__class__": "ImageClassificationSample"}
        described = {"sample_type": sample, "field_map": {"image": "png", "label_name": "cls"}}
        (path / ".nv-meta" / "dataset.yaml").write_text(json.dumps(described))

    samples = energon.get_train_dataset(
        str(job.written("energon", write)),
        batch_size=BATCH_SIZE,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        virtual_epoch_length=job.count // BATCH_SIZE,
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=job.options["num_workers"]),
    )
    return energon.get_loader(samples)


def opacus(job: Job) -> Any:
    """The loader that `PrivacyEngine` makes of one, for batches of Poisson's sampling."""
    from opacus.data_loader import DPDataLoader

    samples = TensorDataset(torch.from_numpy(job.volumes), torch.arange(job.count))
    return DPDataLoader.from_data_loader(job.load(samples))


def scdataset(job: Job) -> Any:
    """Cells in batches, fetched by blocks."""
    from scdataset import BlockShuffling, scDataset

    cells = np.random.default_rng(0).random((job.count, 200), dtype=np.float32)
    batches = scDataset(cells, BlockShuffling(block_size=4), batch_size=BATCH_SIZE, fetch_factor=2, seed=1)
    return job.load(batches, batch_size=None)


def scvi(job: Job) -> Any:
    """The loader of a model's counts."""
    import anndata
    from scvi.dataloaders import AnnDataLoader
    from scvi.model import SCVI

    counts = np.random.default_rng(0).poisson(1, size=(job.count, 200)).astype(np.float32)
    cells = anndata.AnnData(counts, {"batch": [str(index % 4) for index in range(job.count)]})
    SCVI.setup_anndata(cells, batch_key="batch")
    return AnnDataLoader(SCVI(cells).adata_manager, batch_size=BATCH_SIZE, shuffle=True, **job.options)
