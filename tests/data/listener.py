"""A model that learns nothing and notes which rows it is given."""

import torch
from lightning import Callback, LightningModule, Trainer

from tests.support.models import byte_tokenizer


class Listener(LightningModule):
    """Notes what `training_step` and `predict_step` are given; its tokenizer is of bytes."""

    def __init__(self, note, tokenizer=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.automatic_optimization = False
        self.note, self.tokenizer = note, tokenizer or byte_tokenizer()
        self.trained, self.validated, self.texts = [], [], []

    def fit_tokenizer(self, texts):
        self.texts = list(texts)
        return self.tokenizer

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

    def training_step(self, batch, batch_idx):
        self.trained.append(self.note(batch))

    def validation_step(self, batch, batch_idx):
        self.validated.append(self.note(batch))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.note(batch)


class SaveAt(Callback):
    """Saves a checkpoint in the given hook, after a number of training batches, and stops."""

    def __init__(self, path, batch, hook="on_train_batch_end"):
        self.path, self.batch, self.hook, self.saved = path, batch, hook, False

    def on_train_batch_end(self, trainer, module, *args):
        self.save("on_train_batch_end", trainer, module)

    def on_validation_end(self, trainer, module):
        self.save("on_validation_end", trainer, module)

    def on_train_epoch_end(self, trainer, module):
        self.save("on_train_epoch_end", trainer, module)

    def save(self, hook, trainer, module):
        if hook == self.hook and len(module.trained) == self.batch and not self.saved:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = self.saved = True


def quiet_trainer(tmp_path, epochs=1, **settings):
    """A trainer on the CPU that writes nothing and says nothing."""
    return Trainer(
        default_root_dir=tmp_path,
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **settings,
    )


def train_and_record(tmp_path, data, note, epochs=1, ckpt_path=None, save=None, **settings):
    """Return the notes on all batches that a fit trained on."""
    module = Listener(note)
    trainer = quiet_trainer(tmp_path, epochs, callbacks=[save] if save else [], **settings)
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module.trained
