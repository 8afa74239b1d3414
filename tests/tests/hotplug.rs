//! Hot-plug on two nodes: one lab for its functions, one for outages.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints its measurements")]

#[path = "hotplug/bad_input.rs"]
mod bad_input;
#[path = "hotplug/command_line.rs"]
mod command_line;
#[path = "hotplug/crashes.rs"]
mod crashes;
#[path = "hotplug/elements.rs"]
mod elements;
#[path = "hotplug/flags.rs"]
mod flags;
#[path = "hotplug/links.rs"]
mod links;
#[path = "hotplug/multus_attachments.rs"]
mod multus_attachments;
#[path = "hotplug/multus_config.rs"]
mod multus_config;
#[path = "hotplug/node_kinds.rs"]
mod node_kinds;
#[path = "hotplug/plug.rs"]
mod plug;
#[path = "hotplug/pod_end.rs"]
mod pod_end;
#[path = "hotplug/rbac.rs"]
mod rbac;
#[path = "hotplug/settings.rs"]
mod settings;
#[path = "hotplug/status.rs"]
mod status;

use std::process::ExitCode;

use bad_input::{
    a_plugin_that_hangs_in_many_pods_delays_no_other_pod,
    an_annotation_that_cannot_be_parsed_changes_nothing,
    broken_plugins_and_nads_are_reported_and_stop_nothing,
    failing_pods_of_a_namespace_leave_places_for_others, names_and_changed_requests_are_refused,
};
use command_line::the_command_line_plugs_and_unplugs;
use crashes::{
    a_daemon_killed_at_any_step_converges_without_a_leak, a_rebooted_node_leaks_no_address,
    a_stopping_daemon_finishes_or_records_an_add, an_api_server_that_hangs_for_20_s_loses_nothing,
    restarts_of_multus_and_containerd_lose_no_edit,
};
use e2e::{Suite, patchbay, run_suites, tests};
use elements::{
    a_default_route_acts_and_the_replaced_one_comes_back, a_plugin_gets_the_same_input_as_at_pod_start,
    a_vlan_on_a_macvlan_is_plugged_after_it_and_unplugged_before_it,
    an_infiniband_guid_reaches_the_plugin_as_at_pod_start, bandwidth_limits_a_hot_plugged_interface,
    mapped_ports_of_a_plugged_interface_end_with_it,
};
use flags::flags_of_hot_plug_are_honoured;
use lab::Topology;
use links::{
    a_deleted_link_is_plugged_again_within_5_s, a_lost_link_of_pod_start_is_only_reported,
    a_nad_created_later_is_attached_within_5_s, a_nad_without_config_means_a_file_of_the_node,
    a_network_of_cni_0_2_0_is_unplugged_although_it_was_made_at_pod_start,
    a_renamed_or_moved_link_is_not_plugged_again, a_renamed_or_moved_link_of_pod_start_is_unplugged,
    an_unplug_uses_the_config_of_the_plug,
};
use multus_attachments::{
    attachments_of_pod_start_are_unplugged, attachments_of_the_original_are_unplugged_and_released,
    default_networks_of_multus_stay, nothing_is_plugged_while_the_original_runs_on_the_node,
};
use multus_config::{
    default_networks_of_multus_in_other_namespaces_are_not_detached,
    the_configuration_of_the_running_multus_daemon_is_followed,
};
use node_kinds::nodes_with_crio_thin_multus_or_no_multus_are_served;
use plug::{
    a_bridge_network_with_patchbay_ipam_is_hot_plugged_across_nodes,
    a_bridge_with_host_local_is_plugged_and_unplugged, a_failing_element_neither_stops_nor_undoes_others,
    a_network_is_swapped_on_one_interface_name, an_edit_before_the_pod_runs_is_applied_once_it_runs,
    an_empty_or_missing_annotation_removes_all_interfaces, comma_form_and_unnamed_elements_are_plugged,
    seven_quick_edits_end_in_the_last_one_and_leak_no_address, the_readme_example_of_the_original_works,
};
use pod_end::{
    a_host_network_pod_is_rejected_once_per_change,
    a_recreated_sandbox_keeps_no_old_address_and_can_be_edited,
    a_reinstalled_patchbay_unplugs_and_releases_what_it_had_plugged, a_restarted_container_changes_nothing,
    a_static_pod_is_hot_plugged, a_terminating_pod_gets_no_new_interface,
    addresses_of_pods_deleted_while_the_daemon_was_down_are_released,
    deleting_a_pod_releases_its_addresses_within_30_s,
};
use rbac::{
    a_daemon_can_patch_only_two_annotations_of_pods_of_its_node,
    a_pod_that_claims_the_uid_of_a_deleted_pod_changes_nothing_there,
    a_pod_with_long_annotations_gets_its_status, hot_plug_needs_each_of_its_capabilities,
    with_hotplug_off_only_own_attachments_are_torn_down,
};
use settings::{
    a_configuration_file_that_cannot_be_used_is_reported,
    plugins_write_where_multus_writes_although_mounts_are_private,
    the_configuration_file_of_the_original_names_the_runtime_socket,
};
use status::{
    a_lost_status_is_written_again, a_plug_is_one_write_and_one_event,
    a_result_with_two_pod_interfaces_is_one_attachment, a_slow_plug_is_shown_as_pending,
    a_status_that_multus_could_not_write_gets_the_default_network_first,
    device_information_of_pod_start_stays_in_the_status, entries_of_other_writers_stay,
    pods_at_rest_cause_no_write, untouched_pods_cause_no_write_when_the_daemon_starts,
};

const NODES: [&str; 2] = ["node-1", "node-2"];

fn main() -> ExitCode {
    run_suites(&[
        Suite {
            name: "t-hotplug",
            topology: Topology::Nodes(2),
            set_up: |lab| Box::pin(async move { patchbay::install(&lab).await }),
            tests: tests![
                a_bridge_with_host_local_is_plugged_and_unplugged
                    + an_empty_or_missing_annotation_removes_all_interfaces
                    + the_readme_example_of_the_original_works
                    + a_bridge_network_with_patchbay_ipam_is_hot_plugged_across_nodes
                    + comma_form_and_unnamed_elements_are_plugged
                    + a_plugin_gets_the_same_input_as_at_pod_start
                    + a_vlan_on_a_macvlan_is_plugged_after_it_and_unplugged_before_it
                    + an_infiniband_guid_reaches_the_plugin_as_at_pod_start
                    + a_default_route_acts_and_the_replaced_one_comes_back,
                an_edit_before_the_pod_runs_is_applied_once_it_runs
                    + seven_quick_edits_end_in_the_last_one_and_leak_no_address
                    + a_network_is_swapped_on_one_interface_name
                    + a_failing_element_neither_stops_nor_undoes_others
                    + deleting_a_pod_releases_its_addresses_within_30_s
                    + a_restarted_container_changes_nothing
                    + a_terminating_pod_gets_no_new_interface
                    + a_host_network_pod_is_rejected_once_per_change,
                a_renamed_or_moved_link_is_not_plugged_again
                    + a_renamed_or_moved_link_of_pod_start_is_unplugged
                    + a_network_of_cni_0_2_0_is_unplugged_although_it_was_made_at_pod_start
                    + a_lost_link_of_pod_start_is_only_reported
                    + a_nad_created_later_is_attached_within_5_s
                    + an_unplug_uses_the_config_of_the_plug
                    + a_nad_without_config_means_a_file_of_the_node
                    + attachments_of_pod_start_are_unplugged
                    + bandwidth_limits_a_hot_plugged_interface
                    + mapped_ports_of_a_plugged_interface_end_with_it
                    + device_information_of_pod_start_stays_in_the_status
                    + a_daemon_can_patch_only_two_annotations_of_pods_of_its_node
                    + a_pod_with_long_annotations_gets_its_status,
                a_plugin_that_hangs_in_many_pods_delays_no_other_pod
                    + failing_pods_of_a_namespace_leave_places_for_others
                    + broken_plugins_and_nads_are_reported_and_stop_nothing
                    + an_annotation_that_cannot_be_parsed_changes_nothing
                    + names_and_changed_requests_are_refused
                    + the_command_line_plugs_and_unplugs,
                a_deleted_link_is_plugged_again_within_5_s
                    + a_plug_is_one_write_and_one_event
                    + a_slow_plug_is_shown_as_pending
                    + a_lost_status_is_written_again
                    + a_status_that_multus_could_not_write_gets_the_default_network_first
                    + entries_of_other_writers_stay
                    + a_result_with_two_pod_interfaces_is_one_attachment
                    + pods_at_rest_cause_no_write,
            ],
        },
        Suite {
            name: "t-hotplug-outages",
            topology: Topology::Nodes(2),
            set_up: |lab| Box::pin(async move { patchbay::install(&lab).await }),
            tests: tests![
                // The first one restarts the daemon of node-1, the second one restarts programs of node-2.
                a_daemon_killed_at_any_step_converges_without_a_leak
                    + restarts_of_multus_and_containerd_lose_no_edit,
                a_stopping_daemon_finishes_or_records_an_add
                    + a_recreated_sandbox_keeps_no_old_address_and_can_be_edited,
                untouched_pods_cause_no_write_when_the_daemon_starts + a_static_pod_is_hot_plugged,
                default_networks_of_multus_stay,
                // The first one stops the kubelet of node-2, the second one restarts the daemon of node-1.
                a_pod_that_claims_the_uid_of_a_deleted_pod_changes_nothing_there
                    + plugins_write_where_multus_writes_although_mounts_are_private,
                the_configuration_file_of_the_original_names_the_runtime_socket,
                a_configuration_file_that_cannot_be_used_is_reported,
                addresses_of_pods_deleted_while_the_daemon_was_down_are_released,
                attachments_of_the_original_are_unplugged_and_released,
                nothing_is_plugged_while_the_original_runs_on_the_node,
                with_hotplug_off_only_own_attachments_are_torn_down,
                the_configuration_of_the_running_multus_daemon_is_followed,
                default_networks_of_multus_in_other_namespaces_are_not_detached,
                flags_of_hot_plug_are_honoured,
                hot_plug_needs_each_of_its_capabilities,
                an_api_server_that_hangs_for_20_s_loses_nothing,
                a_rebooted_node_leaks_no_address,
                nodes_with_crio_thin_multus_or_no_multus_are_served,
                a_reinstalled_patchbay_unplugs_and_releases_what_it_had_plugged,
            ],
        },
    ])
}
