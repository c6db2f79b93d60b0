"""Names of container images, as YARN accepts them. Pure."""

from __future__ import annotations

import re

from hopsgpu.errors import ConfigError

# The pattern of YARN's DockerLinuxContainerRuntime; it accepts no digest after the name.
_NAME = re.compile(r"(([a-zA-Z0-9.-]+)(:\d+)?/)?([a-z0-9_./-]+)(:[\w.-]+)?", re.ASCII)
_MAX_LENGTH = 512


def check_image_name(image: object, argument: str) -> None:
    """Check the name of an image.

    Args:
        argument: name of the argument or property, for the error.

    Raises:
        ConfigError: YARN would refuse the name.
    """
    if (
        not isinstance(image, str)
        or len(image) > _MAX_LENGTH
        or image.startswith("-")
        or not _NAME.fullmatch(image)
    ):
        raise ConfigError(
            f"{argument}={image!r}: must be the name of a container image, as YARN accepts it:"
            " [REGISTRY[:PORT]/]NAME[:TAG], such as 'registry.company:5000/train:1'; a digest"
            " (NAME@sha256:…) is not accepted"
        )
