"""Load the codec, which turns raw inputs into the model's tensors."""

from app import codecs
from app.codecs import NO_CODEC, LoadedCodec
from app.graph import Lane, Skipped, stage
from app.settings import Settings


@stage(Lane.DISK)
def load_codec(settings: Settings) -> LoadedCodec | Skipped[LoadedCodec]:
    """Give the codec; raises SettingsError where it cannot be imported or declares what it does not do."""
    if settings.model.codec is None:
        return Skipped(NO_CODEC, "model.codec is not set")
    return codecs.load(settings.model, settings.model_paths[0])
