"""`weft.ray.serve`: a Ray Serve application with the protocols of `weft serve`, behind Ray's proxy and its autoscaling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def serve(
    make: Callable[[], Callable[..., Any]],
    *,
    name: str | None = None,
    example: Mapping[str, Any] | None = None,
    library: str | None = None,
    token: str | None = None,
    hosts: Sequence[str] = (),
    limits: Any = None,
    serve_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a Ray Serve application, for `ray.serve.run`: a model behind the HTTP protocols of `weft serve`.

    `make` runs in each of Serve's replicas and returns the model, which gets a batcher there; Ray's proxy spreads requests over
    the replicas, and starts and ends replicas as `serve_options` says.

    - `name`, `example`, `library`, `options`: as of `weft.serve.model`.
    - `token`, `hosts`, `limits`: as of `weft.serve.app`.
    - `serve_options`: options of the Ray Serve deployment, such as `num_replicas`, `autoscaling_config`, `ray_actor_options`.
    """
    try:
        from ray import serve as ray_serve
    except ImportError as error:
        raise ImportError("weft.ray.serve needs Ray Serve: pip install 'weft[ray-serve]'") from error
    from .deployment import check_make, pickled

    check_make(make)
    pickled(make, options)
    known_as = name or str(getattr(make, "__name__", type(make).__name__))

    def build() -> Any:  # runs in each replica
        from weft.serve import app, model

        served = model(factory=make, name=known_as, example=example, library=library, **options)
        return app(served, token=token, hosts=hosts, limits=limits)

    deployment = ray_serve.deployment(ray_serve.ingress(build)())
    return deployment.options(**{"name": known_as, **(serve_options or {})}).bind()
