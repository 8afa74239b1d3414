//! What a pod says about the networks that it wants: the annotations of the multi-network de-facto standard and of multus.
//!
//! Anybody may write an annotation, and others read it more or less strictly. Here it is read as widely as any of them
//! does: a reference that multus would refuse costs nothing when it is counted, one that was overlooked costs a link.

use std::{collections::BTreeSet, fmt};

use serde_json::{Map, Value};

/// The annotation that names the networks of a pod.
pub const NETWORKS_ANNOTATION: &str = "k8s.v1.cni.cncf.io/networks";
/// The annotation that names the network which takes the place of the cluster's own.
pub const DEFAULT_NETWORK_ANNOTATION: &str = "v1.multus-cni.io/default-network";
/// Where multus looks for a default network that is named without a namespace.
pub const MULTUS_NAMESPACE: &str = "kube-system";
/// The networks that are read of one annotation at most.
pub const MAX_ELEMENTS: usize = 4096;
/// The attachments that one object is taken to use at most. No pod has so many interfaces, and each that is named is kept
/// in memory for as long as the object is there, whoever made it up.
pub const MAX_NAD_REFS: usize = 64;
/// What is repeated of a text at most.
const LONGEST_ECHO: usize = 64;

/// A NetworkAttachmentDefinition, by its names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NadRef {
    /// Where it is.
    pub namespace: String,
    /// What it is called.
    pub name: String,
}

/// One network that a pod asks for.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NetworkSelectionElement {
    /// The namespace of the attachment, if one is named.
    pub namespace: Option<String>,
    /// The name of the attachment.
    pub name: String,
    /// The name that the interface should have in the pod.
    pub interface: Option<String>,
    /// The hardware address that it should have.
    pub mac: Option<String>,
    /// The addresses that it should have.
    pub ips: Vec<String>,
    /// What else the plugin is told.
    pub cni_args: Option<Map<String, Value>>,
    /// The claim that holds its addresses.
    pub ipam_claim: Option<String>,
    /// The gateways of the pod's default route, if it should go over this network.
    pub default_route: Vec<String>,
}

/// What was read of an annotation: all that could be, and what was wrong with the rest.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NetworkSelection {
    /// In the order in which they were named.
    pub elements: Vec<NetworkSelectionElement>,
    /// The first thing that could not be read.
    pub error: Option<Error>,
}

/// Why a part of an annotation could not be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// It looks like JSON and is none.
    #[error("it looks like JSON and is none: {0}")]
    Json(String),
    /// It is JSON, but no list of objects.
    #[error("a list of objects is expected, with a name in each")]
    Shape,
    /// A name that cannot be one.
    #[error("{0:?} is not [NAMESPACE/]NAME[@INTERFACE]")]
    Name(String),
    /// Too many.
    #[error("only the first {MAX_ELEMENTS} networks are read")]
    TooMany,
}

impl NadRef {
    /// The attachment of this name in this namespace.
    pub fn new(namespace: impl Into<String>, name: impl Into<String>) -> Self {
        Self { namespace: namespace.into(), name: name.into() }
    }

    /// Reads `name` or `namespace/name`, as a virtual machine names a network.
    pub fn parse(text: &str, namespace: &str) -> Option<Self> {
        let element = parse_item(text)?;
        Some(element.reference(namespace))
    }
}

impl fmt::Display for NadRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl NetworkSelectionElement {
    /// The attachment that is meant by an object of this namespace.
    pub fn reference(&self, namespace: &str) -> NadRef {
        NadRef::new(self.namespace.as_deref().unwrap_or(namespace), self.name.as_str())
    }
}

impl NetworkSelection {
    /// Reads the value of an annotation.
    pub fn parse(text: &str) -> Self {
        let mut selection = Self::default();
        if text.contains(['[', '{', '"']) {
            selection.parse_json(text);
        } else {
            selection.parse_text(text);
        }
        selection
    }

    fn parse_text(&mut self, text: &str) {
        for one in text.split(',').map(str::trim).filter(|one| !one.is_empty()) {
            match parse_item(one) {
                Some(element) => self.push(element),
                None => self.fail(Error::Name(short(one))),
            }
        }
    }

    fn parse_json(&mut self, text: &str) {
        match serde_json::from_str(text) {
            Ok(Value::Array(list)) => list.iter().for_each(|value| self.parse_value(value)),
            Ok(value @ (Value::Object(_) | Value::String(_))) => {
                self.fail(Error::Shape);
                self.parse_value(&value);
            }
            Ok(Value::Null | Value::Bool(_) | Value::Number(_)) => self.fail(Error::Shape),
            Err(error) => self.fail(Error::Json(short(&error.to_string()))),
        }
    }

    fn parse_value(&mut self, value: &Value) {
        match value {
            Value::Object(fields) => match parse_object(fields) {
                Some(element) => self.push(element),
                None => self.fail(Error::Shape),
            },
            Value::String(text) => {
                self.fail(Error::Shape);
                if let Some(element) = parse_item(text) {
                    self.push(element);
                }
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => self.fail(Error::Shape),
        }
    }

    fn push(&mut self, element: NetworkSelectionElement) {
        if self.elements.len() < MAX_ELEMENTS {
            self.elements.push(element);
        } else {
            self.fail(Error::TooMany);
        }
    }

    fn fail(&mut self, error: Error) {
        self.error.get_or_insert(error);
    }
}

/// Every attachment that an object of this namespace names in its two annotations, each once and sorted: the first
/// [`MAX_NAD_REFS`] of them.
///
/// Multus looks for a default network without a namespace in its own one; others may look in the pod's: both count.
pub fn nad_refs(networks: Option<&str>, default: Option<&str>, namespace: &str) -> Vec<NadRef> {
    let networks = NetworkSelection::parse(networks.unwrap_or_default());
    let default = NetworkSelection::parse(default.unwrap_or_default());
    let homes = [namespace, MULTUS_NAMESPACE];
    let default = default.elements.iter().flat_map(|element| homes.map(|home| element.reference(home)));
    limit_nad_refs(default.chain(networks.elements.iter().map(|element| element.reference(namespace))))
}

/// The first [`MAX_NAD_REFS`] of these, each once and sorted.
pub fn limit_nad_refs(references: impl IntoIterator<Item = NadRef>) -> Vec<NadRef> {
    let mut found = BTreeSet::new();
    for reference in references {
        if found.len() >= MAX_NAD_REFS {
            break;
        }
        found.insert(reference);
    }
    found.into_iter().collect()
}

/// `[namespace/]name[@interface]`, with blanks anywhere around the parts.
fn parse_item(text: &str) -> Option<NetworkSelectionElement> {
    let (namespace, rest) = match text.split_once('/') {
        Some((namespace, rest)) => (Some(namespace.trim()), rest),
        None => (None, text),
    };
    let (name, interface) = match rest.split_once('@') {
        Some((name, interface)) => (name.trim(), Some(interface.trim())),
        None => (rest.trim(), None),
    };
    let namespace = namespace.filter(|namespace| !namespace.is_empty());
    if !namespace.is_none_or(is_name) || !is_name(name) || interface.is_some_and(|it| it.contains(['@', '/']))
    {
        return None;
    }
    Some(NetworkSelectionElement {
        namespace: namespace.map(str::to_owned),
        name: name.to_owned(),
        interface: interface.filter(|it| !it.is_empty()).map(str::to_owned),
        ..NetworkSelectionElement::default()
    })
}

fn parse_object(fields: &Map<String, Value>) -> Option<NetworkSelectionElement> {
    // Multus is written in Go, whose JSON does not care about case.
    let field = |wanted: &str| {
        let exact = fields.get(wanted);
        exact.or_else(|| {
            fields.iter().find(|(key, _)| key.eq_ignore_ascii_case(wanted)).map(|(_, value)| value)
        })
    };
    let text = |wanted: &str| field(wanted)?.as_str().map(str::trim).filter(|text| !text.is_empty());
    let list = |wanted: &str| match field(wanted) {
        Some(Value::Array(list)) => list.iter().filter_map(|one| one.as_str().map(str::to_owned)).collect(),
        Some(Value::String(one)) => vec![one.clone()],
        _ => Vec::new(),
    };
    // A name with its namespace in front is against the standard, and seen all the same.
    let named = parse_item(text("name")?)?;
    let namespace = match text("namespace") {
        Some(namespace) if !is_name(namespace) => return None,
        Some(namespace) => Some(namespace.to_owned()),
        None => named.namespace,
    };
    Some(NetworkSelectionElement {
        namespace,
        name: named.name,
        interface: text("interface").or(text("interfaceRequest")).map(str::to_owned).or(named.interface),
        mac: text("mac").map(str::to_owned),
        ips: list("ips"),
        cni_args: field("cni-args").and_then(Value::as_object).cloned(),
        ipam_claim: text("ipam-claim-reference").map(str::to_owned),
        default_route: list("default-route"),
    })
}

/// Whether an object can have this name at all.
fn is_name(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    (1..=253).contains(&text.len()) && text.chars().all(inner) && !text.starts_with(['-', '.'])
}

fn short(text: &str) -> String {
    match text.char_indices().nth(LONGEST_ECHO) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn named(networks: &str) -> Vec<String> {
        nad_refs(Some(networks), None, "home").iter().map(NadRef::to_string).collect()
    }

    #[test]
    fn a_network_is_found_in_every_form() {
        for (text, wanted) in [
            ("", &[][..]),
            (" , ,", &[]),
            ("a", &["home/a"]),
            ("other/a", &["other/a"]),
            ("a@eth1", &["home/a"]),
            ("other/a@eth1", &["other/a"]),
            (" other / a @ eth1 ", &["other/a"]),
            ("/a", &["home/a"]),
            ("a,b , other/c@x", &["home/a", "home/b", "other/c"]),
            ("a,a@eth2", &["home/a"]),
            (r#"[{"name": "a"}]"#, &["home/a"]),
            (r#"[{"name": "a", "namespace": "other"}]"#, &["other/a"]),
            (r#"[{"name": "a", "namespace": ""}]"#, &["home/a"]),
            (r#"[{"Name": "a", "Namespace": "other"}]"#, &["other/a"]),
            (r#"[{"name": "other/a"}]"#, &["other/a"]),
            (r#" [ {"name": "a", "interface": "x"}, {"name": "b"} ] "#, &["home/a", "home/b"]),
            (r#"{"name": "a"}"#, &["home/a"]),
            (r#"["a", "other/b"]"#, &["home/a", "other/b"]),
            ("a.b-c", &["home/a.b-c"]),
        ] {
            assert_eq!(named(text), wanted, "{text}");
        }
    }

    #[test]
    fn what_can_be_read_is_read_and_the_rest_is_told() {
        for (text, wanted, error) in [
            ("a,B!,c", &["home/a", "home/c"][..], Error::Name("B!".into())),
            ("x/y/z", &[], Error::Name("x/y/z".into())),
            ("a@b@c", &[], Error::Name("a@b@c".into())),
            (r#"[{"name": "a"}, 7, {"mac": "x"}, {"name": "b"}]"#, &["home/a", "home/b"], Error::Shape),
            (r#"[{"name": 7}]"#, &[], Error::Shape),
        ] {
            assert_eq!(
                (named(text), NetworkSelection::parse(text).error),
                (wanted.iter().map(|it| (*it).to_owned()).collect(), Some(error))
            );
        }
        assert!(matches!(NetworkSelection::parse("[{").error, Some(Error::Json(_))));
        assert!(matches!(NetworkSelection::parse(&"[".repeat(100_000)).error, Some(Error::Json(_))));
        let many = NetworkSelection::parse(&"a,".repeat(MAX_ELEMENTS + 1));
        assert_eq!((many.elements.len(), many.error), (MAX_ELEMENTS, Some(Error::TooMany)));
    }

    #[test]
    fn of_one_object_only_so_many_attachments_count_however_often_it_names_one() {
        let many: Vec<String> = (0..10_000).map(|number| format!("n{number}")).collect();
        assert_eq!(named(&many.join(",")).len(), MAX_NAD_REFS);
        assert_eq!(nad_refs(Some(&many.join(",")), Some(&many.join(",")), "home").len(), MAX_NAD_REFS);
        let one = format!("{}blue", "red,".repeat(MAX_NAD_REFS + 1));
        assert_eq!(named(&one), ["home/blue", "home/red"]);
    }

    #[test]
    fn a_default_network_is_looked_for_where_multus_does_and_where_the_pod_is() {
        let found = |text| nad_refs(None, Some(text), "home");
        let [here, there] = ["home", "kube-system"].map(|namespace| NadRef::new(namespace, "a"));
        assert_eq!(found("a"), [here.clone(), there.clone()]);
        assert_eq!(found(r#"[{"name": "a"}]"#), [here, there]);
        assert_eq!(found("other/a"), [NadRef::new("other", "a")]);
    }

    #[test]
    fn what_the_plugin_is_told_is_kept() {
        let text = r#"[{"name": "a", "interface": "net7", "mac": "02:00:00:00:00:01", "ips": ["10.0.0.1/24"],
            "cni-args": {"x": 1}, "ipam-claim-reference": "c", "default-route": ["10.0.0.254"]}]"#;
        let wanted = NetworkSelectionElement {
            namespace: None,
            name: "a".to_owned(),
            interface: Some("net7".to_owned()),
            mac: Some("02:00:00:00:00:01".to_owned()),
            ips: vec!["10.0.0.1/24".to_owned()],
            cni_args: serde_json::json!({"x": 1}).as_object().cloned(),
            ipam_claim: Some("c".to_owned()),
            default_route: vec!["10.0.0.254".to_owned()],
        };
        assert_eq!(NetworkSelection::parse(text), NetworkSelection { elements: vec![wanted], error: None });
        assert_eq!(NetworkSelection::parse("a@net7").elements[0].interface.as_deref(), Some("net7"));
    }

    proptest! {
        #[test]
        fn never_panics(text in any::<String>(), json in r#"\[[\[\]{}",:a-z/@0-9]*\]?"#) {
            nad_refs(Some(&text), Some(&json), "home");
        }
    }
}
