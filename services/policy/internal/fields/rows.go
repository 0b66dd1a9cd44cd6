// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fields

import "maps"

// rows describes the fields of structs, by "package.Struct.field". A key may end with "@" and a kind or the name of
// an outer field; the row then applies only in that kind or field.
var rows = merged(commonRows, networkPolicyRows, ciliumRows, adminRows, oldAdminRows)

func merged(parts ...map[string]row) map[string]row {
	out := map[string]row{}
	for _, part := range parts {
		maps.Copy(out, part)
	}
	return out
}

// nodeLabels is the setting that allows policies to select nodes by label.
const nodeLabels = "cluster.nodeLabels"

// byServer returns the row of a metadata field that only the API server writes.
func byServer(about, example string) row {
	return row{support: NoEffect, about: about, example: example}
}

// commonRows are the rows of fields that all kinds have.
var commonRows = map[string]row{
	"networkpolicy.Meta.apiVersion": {
		required: true, about: "Group and version of the kind.", example: "VERSION", other: "example.com/v1",
	},
	"networkpolicy.Meta.kind": {required: true, about: "The kind.", example: "KIND", other: "Pod"},
	"networkpolicy.Meta.metadata": {
		required: true,
		about:    "Name, namespace and labels of the object.",
		example:  "{name: NAME}",
	},
	"networkpolicy.Meta.status": {
		support: NoEffect, about: "Status of the object, which a controller writes.", example: "{conditions: []}",
	},
	"networkpolicy.ObjectMeta.name": {
		required: true, about: "Name of the object: a DNS name in lower case.", example: "p", other: "q",
	},
	"networkpolicy.ObjectMeta.name@BaselineAdminNetworkPolicy": {
		required: true,
		about:    "Name of the object: there is one BaselineAdminNetworkPolicy.",
		values:   []string{"default"},
		example:  "default", other: "q",
	},
	"networkpolicy.ObjectMeta.namespace": {
		support: Refused, becomes: "the kind is cluster-wide", about: "Namespace of the object.", example: "shop",
	},
	"networkpolicy.ObjectMeta.namespace@NetworkPolicy": {
		about: "Namespace of the object and of the pods that it selects. Without it: default, or what " +
			"--namespace says.",
		example: "shop",
	},
	"networkpolicy.ObjectMeta.namespace@CiliumNetworkPolicy": {
		about: "Namespace of the object and of the pods that it selects. Without it: default, or what " +
			"--namespace says.",
		example: "shop",
	},
	"networkpolicy.ObjectMeta.labels": {
		support: NoEffect, about: "Labels of the object.", example: "{team: a}",
	},
	"networkpolicy.ObjectMeta.labels@CiliumCIDRGroup": {
		about:   "Labels of the group, by which cidrGroupSelector selects it.",
		example: "{team: a}",
		other:   "{team: b}",
	},
	"networkpolicy.ObjectMeta.annotations": {
		support: NoEffect, about: "Annotations of other programs.", example: "{team: a}",
	},
	"networkpolicy.ObjectMeta.uid": byServer(
		"Unique identifier, set by the API server.", "x",
	),
	"networkpolicy.ObjectMeta.generation": byServer(
		"Generation of the spec, set by the API server.", "1",
	),
	"networkpolicy.ObjectMeta.resourceVersion": byServer(
		"Version of the object, set by the API server.", "'1'",
	),
	"networkpolicy.ObjectMeta.creationTimestamp": byServer(
		"Time of creation, set by the API server.", "'2026-01-01T00:00:00Z'",
	),
	"networkpolicy.ObjectMeta.deletionTimestamp": byServer(
		"Time of deletion, set by the API server.", "'2026-01-01T00:00:00Z'",
	),
	"networkpolicy.ObjectMeta.deletionGracePeriodSeconds": byServer(
		"Seconds until the object is deleted, set by the API server.", "0",
	),
	"networkpolicy.ObjectMeta.managedFields": byServer(
		"Managers of fields, set by the API server.", "[]",
	),
	"networkpolicy.ObjectMeta.ownerReferences": byServer(
		"Owners: this object is deleted with them.", "[]",
	),
	"networkpolicy.ObjectMeta.finalizers": byServer(
		"Controllers that must act before the object is deleted.", "[]",
	),
	"networkpolicy.ObjectMeta.selfLink": byServer(
		"Path of the object, set by old API servers.", "/x",
	),
	"networkpolicy.ObjectMeta.generateName": byServer(
		"Prefix of a name that an API server completes. Sluice requires metadata.name.", "p-",
	),

	"networkpolicy.LabelSelector.matchLabels": {
		about: "Labels that must all be present with these values.", example: "{app: web}", other: "{app: db}",
	},
	"networkpolicy.LabelSelector.matchExpressions": {
		about:   "Requirements that must all be met.",
		example: "[{key: app, operator: Exists}]",
		other:   "[{key: tier, operator: Exists}]",
	},
	"networkpolicy.Expression.key": {
		required: true, about: "Key of a label.", beside: "operator: Exists", example: "app", other: "tier",
	},
	"networkpolicy.Expression.operator": {
		required: true,
		about:    "Requirement for the label.",
		values:   []string{"In", "NotIn", "Exists", "DoesNotExist"},
		beside:   "key: app", example: "Exists", other: "DoesNotExist",
	},
	"networkpolicy.Expression.values": {
		about: "Values for In and NotIn.", beside: "key: app, operator: In", example: "[web]", other: "[db]",
	},
}

var networkPolicyRows = map[string]row{
	"networkpolicy.NetworkPolicy.spec": {
		about: "Subject and rules. Without it, the policy denies all pods of the namespace any incoming " +
			"connections.",
		example: "{podSelector: {matchLabels: {app: db}}}",
	},
	"networkpolicy.NetworkPolicySpec.podSelector": {
		about:   "Pods of the namespace that the policy applies to. Empty, or absent: all.",
		example: "{matchLabels: {app: db}}", other: "{}",
	},
	"networkpolicy.NetworkPolicySpec.policyTypes": {
		about: "Directions in which the pods are isolated. Without it: Ingress, and Egress if there are " +
			"egress rules.",
		values: []string{"Ingress", "Egress"}, example: "[Egress]",
	},
	"networkpolicy.NetworkPolicySpec.ingress": {about: "Incoming connections that are allowed.", example: "[{}]"},
	"networkpolicy.NetworkPolicySpec.egress":  {about: "Outgoing connections that are allowed.", example: "[{}]"},
	"networkpolicy.NetworkIngressRule.from": {
		about: "Peers. Empty, or absent: all.", example: "[{podSelector: {}}]",
	},
	"networkpolicy.NetworkIngressRule.ports": {
		about:   "Ports. Empty, or absent: all ports of all protocols.",
		example: "[{port: 80}]",
	},
	"networkpolicy.NetworkEgressRule.to": {
		about:   "Peers. Empty, or absent: all.",
		example: "[{podSelector: {}}]",
	},
	"networkpolicy.NetworkEgressRule.ports": {
		about:   "Ports. Empty, or absent: all ports of all protocols.",
		example: "[{port: 80}]",
	},
	"networkpolicy.NetworkPeer.podSelector": {
		about:   "Pods, selected by label, in the policy's namespace or in the namespaces that namespaceSelector selects.",
		example: "{matchLabels: {app: web}}", other: "{}",
	},
	"networkpolicy.NetworkPeer.namespaceSelector": {
		about: "Namespaces, selected by label.", beside: "podSelector: {}", example: "{}",
	},
	"networkpolicy.NetworkPeer.ipBlock": {
		about:   "Addresses, whether they belong to pods, nodes or others.",
		example: "{cidr: 10.9.8.0/24}",
		other:   "{cidr: 10.9.7.0/24}",
	},
	"networkpolicy.IPBlock.cidr": {
		required: true, about: "A prefix, IPv4 or IPv6.", example: "10.9.8.0/24", other: "10.9.7.0/24",
	},
	"networkpolicy.IPBlock.except": {
		about: "Prefixes inside of cidr that are excluded.", beside: "cidr: 10.9.8.0/24", example: "[10.9.8.1/32]",
	},
	"networkpolicy.NetworkPort.protocol": {
		about: "Without it: TCP.", values: []string{"TCP", "UDP", "SCTP"}, beside: "port: 80", example: "UDP",
	},
	"networkpolicy.NetworkPort.port": {
		about:   "Port number, or name of a port of the receiving pod. Without it: all ports of the protocol.",
		example: "80", other: "http",
	},
	"networkpolicy.NetworkPort.endPort": {
		about:   "Last port of a range that starts with port.",
		beside:  "port: 80",
		example: "90",
	},
}
