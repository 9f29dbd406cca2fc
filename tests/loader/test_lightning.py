"""PyG's Lightning datamodules over our loaders: a model is fitted, validated, tested and asked for predictions."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.data.lightning import datamodule
from torch_geometric.nn import GraphSAGE

from stretto.loader import LinkNeighborLoader, NeighborLoader, NeighborSampler, swap
from tests.loader.data import check, heterogeneous, homogeneous

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")


@pytest.fixture
def patched():
    swap.install()
    yield
    swap.remove()


class Net(lightning.LightningModule):
    """Node classification, or links by the product of their ends."""

    def __init__(self, links: bool = False) -> None:
        super().__init__()
        self.gnn, self.links, self.losses, self.seen = GraphSAGE(9, 16, 2, 4), links, [], []

    def step(self, batch: Data) -> torch.Tensor:
        out = self.gnn(batch.x, batch.edge_index)
        if self.links:
            source, target = batch.edge_label_index
            return F.binary_cross_entropy_with_logits((out[source] * out[target]).sum(-1), batch.edge_label.float())
        return F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])

    def training_step(self, batch: Data, number: int) -> torch.Tensor:
        self.seen.append(batch.input_id.cpu())
        loss = self.step(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Data, number: int) -> None:
        self.log("loss", self.step(batch), batch_size=batch.input_id.numel())

    def test_step(self, batch: Data, number: int) -> None:
        self.log("loss", self.step(batch), batch_size=batch.input_id.numel())

    def predict_step(self, batch: Data, number: int) -> torch.Tensor:
        return batch.input_id

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.02)


def trainer(tmp_path, epochs: int = 8):
    return lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip


def labelled() -> Data:
    data = homogeneous()
    data.y = (data.x[:, :4]).argmax(1)
    data.val_mask = ~data.train_mask
    data.test_mask = data.val_mask.clone()
    return data


@pytest.mark.parametrize("workers", [0, 2])
def test_node_data(patched, tmp_path, workers):
    data = labelled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = datamodule.LightningNodeData(
            data, input_pred_nodes=torch.arange(300), num_neighbors=[4, 3], batch_size=32, num_workers=workers,
            eval_loader_kwargs={"num_neighbors": [-1, -1]},
        )  # fmt: skip
        assert isinstance(module.graph_sampler, NeighborSampler)
        assert isinstance(module.train_dataloader(), NeighborLoader)
        assert module.val_dataloader().sampler_.fanouts == {None: [-1, -1]}
        for batch in module.train_dataloader():
            check(batch, data)
        model = Net()
        run = trainer(tmp_path)
        run.fit(model, module)
        half = len(model.losses) // 2
        assert sum(model.losses[half:]) < sum(model.losses[:half])
        train = data.train_mask.nonzero().view(-1)
        assert torch.equal(torch.cat(model.seen).sort().values, train.repeat_interleave(8))
        assert run.test(model, module, verbose=False)[0]["loss"] < 1.6
        predicted = torch.cat(run.predict(model, module))
    assert torch.equal(predicted, torch.arange(300))


def test_link_data(patched, tmp_path):
    data = labelled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = datamodule.LightningLinkData(
            data, input_train_edges=data.edge_index[:, :1200], input_val_edges=data.edge_index[:, 1200:1500],
            loader="neighbor", num_neighbors=[4, 3], batch_size=128, neg_sampling="binary",
        )  # fmt: skip
        assert isinstance(module.train_dataloader(), LinkNeighborLoader)
        model = Net(links=True)
        trainer(tmp_path, 3).fit(model, module)
    assert torch.equal(torch.cat(model.seen).sort().values, torch.arange(1200).repeat_interleave(3))


def test_heterogeneous_node_data(patched):
    data = heterogeneous()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = datamodule.LightningNodeData(
            data, input_train_nodes=("paper", torch.arange(100)), num_neighbors=[3, 2], batch_size=50,
        )  # fmt: skip
        batches = list(module.train_dataloader())
    seen = torch.cat([b["paper"].input_id for b in batches]).sort().values
    assert torch.equal(seen, torch.arange(100))


def test_times_of_seeds(patched):
    """What PyG's datamodules hand on are seeds with their times, and a sampler that knows those of the graph."""
    data = homogeneous()
    data.time = torch.randint(0, 100, (300,), generator=torch.Generator().manual_seed(0))
    nodes, times = torch.arange(100), torch.full((100,), 60)
    options = {"num_neighbors": [3, 2], "batch_size": 20, "num_workers": 0, "time_attr": "time"}
    module = datamodule.LightningNodeData(data, nodes, times, **options)
    loader = module.train_dataloader()
    assert isinstance(loader, NeighborLoader)
    for batch in loader:
        assert (batch.time[batch.batch_size :] <= 60).all()
    links = data.edge_index[:, :40]
    module = datamodule.LightningLinkData(data, links, None, torch.full((40,), 60), **options)
    loader = module.train_dataloader()
    assert isinstance(loader, LinkNeighborLoader)
    for batch in loader:
        later = batch.time > 60
        assert torch.isin(batch.n_id[later], links).all()  # seeds may be later; what they see is not
