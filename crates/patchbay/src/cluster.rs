//! The connection to the cluster, configured as kubectl is.

use std::path::PathBuf;

use anyhow::Context as _;
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};

use crate::lifecycle::client_config;

/// The flags of kubectl that select a cluster and a namespace.
#[derive(Debug, clap::Args)]
pub struct ClusterArgs {
    /// The namespace [default: that of the context]
    #[arg(long, short)]
    namespace: Option<String>,

    /// The context of the kubeconfig [default: its current context]
    #[arg(long)]
    context: Option<String>,

    /// The kubeconfig file [default: $KUBECONFIG, ~/.kube/config, or the ServiceAccount of the pod]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

impl ClusterArgs {
    /// The namespace that the user set.
    pub fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref()
    }

    /// A client, and the namespace to use.
    pub async fn connect(self) -> anyhow::Result<(Client, String)> {
        let Self { namespace, context, kubeconfig } = self;
        let options = KubeConfigOptions { context, ..KubeConfigOptions::default() };
        let config = match kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(&path)
                    .with_context(|| format!("read the kubeconfig {}", path.display()))?;
                Config::from_custom_kubeconfig(file, &options).await
            }
            None if options.context.is_some() => Config::from_kubeconfig(&options).await,
            None => return Self::client(Config::infer().await.context(NO_CLUSTER)?, namespace),
        };
        Self::client(config.context(NO_CLUSTER)?, namespace)
    }

    fn client(config: Config, namespace: Option<String>) -> anyhow::Result<(Client, String)> {
        let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
        let client =
            Client::try_from(client_config(config, "cli")?).context("create a client for the API server")?;
        Ok((client, namespace))
    }
}

const NO_CLUSTER: &str = "find the API server: set --kubeconfig, --context or KUBECONFIG";
