use api::networkservice::NetworkService;
use proptest::prelude::*;
use serde_json::json;

use super::*;

/// A NetService with these fields of its spec, in the flow style of YAML.
fn netservice(name: &str, spec: &str) -> String {
    format!(
        "apiVersion: svcctl.metaswitch.com/v1alpha1\nkind: NetService\nmetadata: {{name: {name}}}\nspec: {spec}\n"
    )
}

/// A Service for multus-service with these fields of its spec.
fn service(spec: &str) -> String {
    format!(
        "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\n  namespace: shop\n  labels:\n    \
         service.kubernetes.io/service-proxy-name: multus-proxy\n    tier: front\n  annotations:\n    \
         k8s.v1.cni.cncf.io/service-network: infra/storage\n    team: a\nspec: {spec}\n"
    )
}

fn converted(text: &str) -> Conversion {
    Conversion::new(text, None)
}

fn error(text: &str) -> String {
    let conversion = converted(text);
    assert_eq!((conversion.failed, conversion.services.len()), (1, 0), "{}", conversion.messages());
    let [line] = &conversion.lines[..] else { panic!("{:?}", conversion.lines) };
    line.strip_prefix("error: ").expect(line).to_owned()
}

#[test]
fn a_netservice_becomes_a_networkservice() {
    let conversion = converted(&netservice("corens", "{netAttachDef: core, selector: {app: utils}}"));
    let expected = "\
apiVersion: patchbay.dev/v1alpha1
kind: NetworkService
metadata:
  name: corens
spec:
  network: core
  selector:
    app: utils
";
    assert_eq!(conversion.output(), expected);
    assert_eq!(conversion.failed, 0);
    let messages = conversion.messages();
    assert!(messages.contains("NAME-template") && messages.contains("--network-namespace"), "{messages}");
}

#[test]
fn networks_without_a_namespace_get_the_one_of_the_flag() {
    let text = [
        netservice("a", "{netAttachDef: core, selector: {app: utils}}"),
        netservice("b", "{netAttachDef: other/core, selector: {app: utils}}"),
    ];
    let conversion = Conversion::new(&text.join("---\n"), Some("networks"));
    assert_eq!(conversion.services[0]["spec"]["network"], "networks/core");
    assert_eq!(conversion.services[1]["spec"]["network"], "other/core");
    assert!(!conversion.messages().contains("--network-namespace"));
}

#[test]
fn what_the_api_server_added_to_an_object_is_left_out() {
    let text = json!({"apiVersion": "v1", "kind": "List", "metadata": {"resourceVersion": ""}, "items": [{
        "apiVersion": "svcctl.metaswitch.com/v1alpha1", "kind": "NetService",
        "metadata": {
            "name": "corens", "namespace": "lab", "uid": "u", "resourceVersion": "7", "generation": 2,
            "creationTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["a/b"], "ownerReferences": [{"uid": "x"}],
            "labels": {"team": "a"},
            "annotations": {"note": "kept", "kubectl.kubernetes.io/last-applied-configuration": "{}"},
        },
        "spec": {"netAttachDef": "core", "selector": {"app": "utils"}, "extra": 1},
        "status": {},
    }]});
    let conversion = converted(&text.to_string());
    let expected = json!({
        "apiVersion": "patchbay.dev/v1alpha1", "kind": "NetworkService",
        "metadata": {"name": "corens", "namespace": "lab", "labels": {"team": "a"}, "annotations": {"note": "kept"}},
        "spec": {"network": "core", "selector": {"app": "utils"}},
    });
    assert_eq!(conversion.services, [expected]);
    assert!(conversion.messages().contains("(document 1, item 1): spec.extra is dropped"));
}

#[test]
fn a_service_of_multus_service_keeps_ports_selector_and_labels() {
    let text = service(
        "{selector: {app: web}, publishNotReadyAddresses: true, ports: [\
         {name: http, port: 80, targetPort: web, protocol: TCP, appProtocol: http}, \
         {name: sctp, port: 90, targetPort: 90, protocol: SCTP}, {name: dns, port: 53, protocol: UDP}]}",
    );
    let conversion = converted(&text);
    let expected = json!({
        "apiVersion": "patchbay.dev/v1alpha1", "kind": "NetworkService",
        "metadata": {"name": "web", "namespace": "shop", "labels": {"tier": "front"}, "annotations": {"team": "a"}},
        "spec": {
            "network": "infra/storage", "selector": {"app": "web"}, "publishNotReadyAddresses": true,
            "ports": [
                {"name": "http", "port": 80, "targetPort": "web", "protocol": "TCP", "appProtocol": "http"},
                {"name": "sctp", "port": 90, "targetPort": 90, "protocol": "SCTP"},
                {"name": "dns", "port": 53, "protocol": "UDP"},
            ],
        },
    });
    assert_eq!(conversion.services, [expected]);
    assert_eq!(conversion.lines.len(), 1, "{:?}", conversion.lines);
    assert!(conversion.lines[0].contains("container port web instead of port 80"), "{:?}", conversion.lines);
}

#[test]
fn what_a_headless_service_cannot_do_is_reported() {
    let text = service(
        "{type: LoadBalancer, clusterIP: 10.96.0.7, clusterIPs: [10.96.0.7], sessionAffinity: ClientIP, ipFamilies: [IPv4], \
         externalIPs: [192.0.2.1], externalTrafficPolicy: Local, selector: {app: web}, \
         ports: [{port: 80, targetPort: 8080, nodePort: 30080}]}",
    );
    let conversion = converted(&text);
    assert_eq!(conversion.services.len(), 1);
    let messages = conversion.messages();
    for expected in [
        "type LoadBalancer becomes Headless",
        "clients connect to target port 8080 instead of port 80",
        "the node port of port 80 is dropped",
        "the cluster IP 10.96.0.7 is not kept",
        "session affinity is dropped",
        "addresses of both families",
        "spec.externalIPs is dropped",
        "spec.externalTrafficPolicy is dropped",
    ] {
        assert!(
            messages.contains(&format!("note: Service shop/web (document 1): {expected}")),
            "{expected}\n{messages}"
        );
    }
}

#[test]
fn an_object_that_cannot_be_converted_says_why() {
    for (text, expected) in [
        (netservice("a", "{selector: {a: b}}"), "spec.netAttachDef is missing"),
        (netservice("a", "{netAttachDef: 7, selector: {a: b}}"), "spec.netAttachDef is not a string"),
        (netservice("a", "{netAttachDef: a/b/c, selector: {a: b}}"), "expected NAME or NAMESPACE/NAME"),
        (netservice("a", "{netAttachDef: 'a, b', selector: {a: b}}"), "expected NAME or NAMESPACE/NAME"),
        (netservice("a", "{netAttachDef: core}"), "spec.selector is empty"),
        (netservice("a", "{netAttachDef: core, selector: {}}"), "spec.selector is empty"),
        (netservice("a", "{netAttachDef: core, selector: [a]}"), "spec.selector is not a map of strings"),
        (netservice("a", "{netAttachDef: core, selector: {a: 1}}"), "the value of a is not a string"),
        (netservice("a", "{netAttachDef: core, selector: {-a: b}}"), "-a=b is not a label"),
        (netservice("a", "{netAttachDef: core, selector: {a/b/c: b}}"), "a/b/c=b is not a label"),
        (netservice("a", "{netAttachDef: core, selector: {a: b c}}"), "a=b c is not a label"),
        (netservice("1a", "{netAttachDef: core, selector: {a: b}}"), "1a cannot be the name of a Service"),
        (netservice("a.b", "{netAttachDef: core, selector: {a: b}}"), "a.b cannot be the name"),
        (netservice("[]", "{netAttachDef: core, selector: {a: b}}"), "metadata.name is missing"),
        (netservice("a", "7"), "spec.netAttachDef is missing"),
        (netservice("a", "{}").replace("v1alpha1", "v2"), "only version v1alpha1"),
        (service("{}"), "spec.selector is empty"),
        (service("{type: ExternalName, externalName: a}"), "a Service of type ExternalName has no pods"),
        (service("{selector: {a: b}, ports: 7}"), "spec.ports is not a list"),
        (service("{selector: {a: b}, ports: [7]}"), "an item that is no object"),
        (service("{selector: {a: b}, ports: [{port: 0}]}"), "no number from 1 to 65535"),
        (service("{selector: {a: b}, ports: [{port: 65536}]}"), "no number from 1 to 65535"),
        (service("{selector: {a: b}, ports: [{port: http}]}"), "no number from 1 to 65535"),
        (service("{selector: {a: b}, ports: [{port: 1, targetPort: 70000}]}"), "target port 70000"),
        (service("{selector: {a: b}, ports: [{port: 1, targetPort: A}]}"), "no name of a port"),
        (service("{selector: {a: b}, ports: [{port: 1, protocol: ICMP}]}"), "the protocol ICMP"),
        (service("{selector: {a: b}, ports: [{port: 1}, {port: 2}]}"), "one of them has no name"),
        (service("{selector: {a: b}, ports: [{name: a, port: 1}, {name: a, port: 2}]}"), "the name a"),
        (service("{selector: {a: b}, ports: [{name: a, port: 1}, {name: b, port: 1}]}"), "the number 1"),
        (service("{selector: {a: b}, publishNotReadyAddresses: 1}"), "not a boolean"),
    ] {
        let error = error(&text);
        assert!(error.contains(expected), "{expected}: {error}\n{text}");
    }
    let ports: Vec<String> = (1..=101).map(|number| format!("{{name: p{number}, port: {number}}}")).collect();
    let error = error(&service(&format!("{{selector: {{a: b}}, ports: [{}]}}", ports.join(","))));
    assert!(error.contains("101 ports; a NetworkService has at most 100"), "{error}");
}

#[test]
fn a_bad_object_and_foreign_kinds_do_not_stop_the_others() {
    let good = |name: &str| netservice(name, "{netAttachDef: core, selector: {app: utils}}");
    let text = [
        good("a"),
        "kind: [\n".to_owned(),
        "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: utils}\n".to_owned(),
        netservice("b", "{}"),
        "apiVersion: v1\nkind: Service\nmetadata: {name: plain}\n".to_owned(),
        good("c"),
        good("a"),
    ];
    let conversion = converted(&text.join("---\n"));
    let names: Vec<&Value> = conversion.services.iter().map(|one| &one["metadata"]["name"]).collect();
    assert_eq!(names, ["a", "c"]);
    assert_eq!(conversion.failed, 3);
    let messages = conversion.messages();
    for expected in [
        "error: document 2: invalid YAML: ",
        "note: Deployment utils (document 3) is not converted\n",
        "error: NetService b (document 4): spec.netAttachDef is missing\n",
        "note: Service plain (document 5) is not converted\n",
        "error: NetService a (document 7): another object of the input becomes the same NetworkService\n",
    ] {
        assert!(messages.contains(expected), "{expected}\n{messages}");
    }
}

#[test]
fn messages_contain_no_control_characters_of_the_input() {
    let name = "\"\\e[31m\\n\u{2028}x\"";
    let text = [
        netservice(name, "{netAttachDef: core}"),
        netservice("a", &format!("{{netAttachDef: {name}, selector: {{a: b}}}}")),
        netservice("a", &format!("{{netAttachDef: core, selector: {{{name}: 7}}}}")),
        format!("apiVersion: v1\nkind: {name}\n"),
        format!("kind: {name}: ][\n"),
    ];
    let messages = converted(&text.join("---\n")).messages();
    assert!(messages.lines().count() >= text.len(), "{messages}");
    assert!(!messages.contains(|c: char| c != '\n' && (c.is_control() || c == '\u{2028}')), "{messages:?}");
}

/// Any JSON value up to a small depth.
fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z0-9./-]{0,8}".prop_map(Value::from),
        any::<String>().prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map("[a-zA-Z]{1,6}", inner, 0..4).prop_map(|map| json!(map)),
        ]
    })
}

proptest! {
    #[test]
    fn no_text_panics(text in any::<String>(), lines in "[-a-z:{}\\[\\]&*!|>#'\", \n]{0,200}") {
        for text in [text, lines] {
            let conversion = converted(&text);
            prop_assert!(conversion.services.is_empty());
        }
    }

    /// What comes out can be read again and has the form of a NetworkService.
    #[test]
    fn no_object_panics(
        kind in prop_oneof![Just("NetService"), Just("Service"), Just("NetServiceList"), Just("List")],
        metadata in any_value(), spec in any_value(), ports in any_value(), selector in any_value(),
        name in any_value(), network in any_value(),
    ) {
        let version = if kind.starts_with("NetService") { "svcctl.metaswitch.com/v1alpha1" } else { "v1" };
        let annotations = json!({multus_service::ANNOTATION: network});
        for metadata in [metadata, json!({"name": name, "annotations": annotations}), json!({"name": "a", "annotations": annotations})] {
            for spec in [&spec, &json!({"netAttachDef": network, "selector": selector, "ports": ports}),
                &json!({"netAttachDef": "core", "selector": {"a": "b"}, "ports": ports})] {
                let object = json!({"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec, "items": [spec]});
                let conversion = converted(&object.to_string());
                for service in &conversion.services {
                    let text = yaml::document(service);
                    prop_assert_eq!(&serde_saphyr::from_str::<Value>(&text).unwrap(), service);
                    let read: NetworkService = serde_json::from_value(service.clone()).unwrap();
                    prop_assert!(!read.spec.selector.is_empty() && !read.spec.network.is_empty());
                }
            }
        }
    }
}

#[test]
fn a_message_is_one_line_whatever_the_input_is() {
    let mut conversion = Conversion::default();
    conversion.fail("no such key \u{1b}[2J\nnote: all is well".to_owned());
    assert_eq!(conversion.messages(), "error: no such key \\u{1b}[2J\\nnote: all is well\n");
}
