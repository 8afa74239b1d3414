//! Watches that outlive the API server.

use std::{fmt::Debug, sync::Arc};

use futures::{Stream, StreamExt, TryStreamExt, stream::BoxStream};
use k8s_openapi::serde::de::DeserializeOwned;
use kube::{
    Api, Resource,
    core::PartialObjectMeta,
    runtime::{WatchStreamExt, watcher},
};
use tracing::warn;

use crate::{
    error::Chain,
    metrics::{Call, Metrics},
};

/// A watch of the one object of this name, which need not exist.
pub fn only(name: &str) -> watcher::Config {
    watcher::Config::default().fields(&format!("metadata.name={name}"))
}

/// Counts and reports a failure; the watch itself goes on after its backoff.
pub fn failed(metrics: &Metrics, call: Call, error: &watcher::Error) {
    metrics.api_error(call);
    warn!(?call, error = %Chain(error), "watch failed and is tried again");
}

/// Says "look" whenever the one object of this name may have changed.
pub fn touches<K>(
    api: Api<PartialObjectMeta<K>>,
    name: &str,
    metrics: Arc<Metrics>,
    call: Call,
) -> BoxStream<'static, ()>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    PartialObjectMeta<K>: Resource<DynamicType = ()>,
{
    watcher(api, only(name))
        .default_backoff()
        .inspect_err(move |error| failed(&metrics, call, error))
        .filter_map(async |event| event.is_ok().then_some(()))
        .boxed()
}

/// Polls a stream to its end, which for a watch never comes.
pub async fn drain(stream: impl Stream) {
    let mut stream = std::pin::pin!(stream);
    while stream.next().await.is_some() {}
}
