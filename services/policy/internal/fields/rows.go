// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fields

import "maps"

// rows are what is said of the fields of a struct, by "package.Struct.field". With
// "@" and a kind, or the name of a field further out, a row is for that place alone.
var rows = merged(commonRows, networkPolicyRows, ciliumRows, adminRows, oldAdminRows)

func merged(parts ...map[string]row) map[string]row {
	out := map[string]row{}
	for _, part := range parts {
		maps.Copy(out, part)
	}
	return out
}

// nodeLabels is the setting that nodes need to be selected by their labels.
const nodeLabels = "cluster.nodeLabels"

// byServer is of metadata that an API server writes.
func byServer(about, example string) row {
	return row{support: NoEffect, about: about, example: example}
}

// commonRows are of what all kinds are written with.
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
		support: NoEffect, about: "What a controller said of the object.", example: "{conditions: []}",
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
		support: NoEffect, about: "Notes of other programs.", example: "{team: a}",
	},
	"networkpolicy.ObjectMeta.uid": byServer(
		"Unique identifier, by the API server.", "x",
	),
	"networkpolicy.ObjectMeta.generation": byServer(
		"Number of the spec's version, by the API server.", "1",
	),
	"networkpolicy.ObjectMeta.resourceVersion": byServer(
		"Version of the object, by the API server.", "'1'",
	),
	"networkpolicy.ObjectMeta.creationTimestamp": byServer(
		"Time of creation, by the API server.", "'2026-01-01T00:00:00Z'",
	),
	"networkpolicy.ObjectMeta.deletionTimestamp": byServer(
		"Time of deletion, by the API server.", "'2026-01-01T00:00:00Z'",
	),
	"networkpolicy.ObjectMeta.deletionGracePeriodSeconds": byServer(
		"Seconds until it is deleted, by the API server.", "0",
	),
	"networkpolicy.ObjectMeta.managedFields": byServer(
		"Who wrote which field, by the API server.", "[]",
	),
	"networkpolicy.ObjectMeta.ownerReferences": byServer(
		"Objects that this one is deleted with.", "[]",
	),
	"networkpolicy.ObjectMeta.finalizers": byServer(
		"Controllers that its deletion waits for.", "[]",
	),
	"networkpolicy.ObjectMeta.selfLink": byServer(
		"Path of the object, by old API servers.", "/x",
	),
	"networkpolicy.ObjectMeta.generateName": byServer(
		"Beginning of a name that an API server completes. Sluice needs metadata.name.", "p-",
	),

	"networkpolicy.LabelSelector.matchLabels": {
		about: "Labels that must all be there with these values.", example: "{app: web}", other: "{app: db}",
	},
	"networkpolicy.LabelSelector.matchExpressions": {
		about:   "Requirements that must all hold.",
		example: "[{key: app, operator: Exists}]",
		other:   "[{key: tier, operator: Exists}]",
	},
	"networkpolicy.Expression.key": {
		required: true, about: "Key of a label.", beside: "operator: Exists", example: "app", other: "tier",
	},
	"networkpolicy.Expression.operator": {
		required: true,
		about:    "What must hold of the label.",
		values:   []string{"In", "NotIn", "Exists", "DoesNotExist"},
		beside:   "key: app", example: "Exists", other: "DoesNotExist",
	},
	"networkpolicy.Expression.values": {
		about: "Values for In and NotIn.", beside: "key: app, operator: In", example: "[web]", other: "[db]",
	},
}

var networkPolicyRows = map[string]row{
	"networkpolicy.NetworkPolicy.spec": {
		about: "What the policy says. Without it, the policy isolates all pods of the namespace against what " +
			"they receive.",
		example: "{podSelector: {matchLabels: {app: db}}}",
	},
	"networkpolicy.NetworkPolicySpec.podSelector": {
		about:   "Pods of the namespace that the policy is for. Empty, or absent: all.",
		example: "{matchLabels: {app: db}}", other: "{}",
	},
	"networkpolicy.NetworkPolicySpec.policyTypes": {
		about: "Directions in which the pods are isolated. Without it: Ingress, and Egress if there are " +
			"egress rules.",
		values: []string{"Ingress", "Egress"}, example: "[Egress]",
	},
	"networkpolicy.NetworkPolicySpec.ingress": {about: "What the pods may receive.", example: "[{}]"},
	"networkpolicy.NetworkPolicySpec.egress":  {about: "What the pods may send.", example: "[{}]"},
	"networkpolicy.NetworkIngressRule.from": {
		about: "Peers. Empty, or absent: all.", example: "[{podSelector: {}}]",
	},
	"networkpolicy.NetworkIngressRule.ports": {
		about:   "Ports. Empty, or absent: all of every protocol.",
		example: "[{port: 80}]",
	},
	"networkpolicy.NetworkEgressRule.to": {
		about:   "Peers. Empty, or absent: all.",
		example: "[{podSelector: {}}]",
	},
	"networkpolicy.NetworkEgressRule.ports": {
		about:   "Ports. Empty, or absent: all of every protocol.",
		example: "[{port: 80}]",
	},
	"networkpolicy.NetworkPeer.podSelector": {
		about:   "Pods by their labels, of the policy's namespace or of those that namespaceSelector selects.",
		example: "{matchLabels: {app: web}}", other: "{}",
	},
	"networkpolicy.NetworkPeer.namespaceSelector": {
		about: "Namespaces by their labels.", beside: "podSelector: {}", example: "{}",
	},
	"networkpolicy.NetworkPeer.ipBlock": {
		about:   "Addresses, whoever has them: pods, nodes, and others.",
		example: "{cidr: 10.9.8.0/24}",
		other:   "{cidr: 10.9.7.0/24}",
	},
	"networkpolicy.IPBlock.cidr": {
		required: true, about: "A prefix, IPv4 or IPv6.", example: "10.9.8.0/24", other: "10.9.7.0/24",
	},
	"networkpolicy.IPBlock.except": {
		about: "Prefixes inside of cidr that are left out.", beside: "cidr: 10.9.8.0/24", example: "[10.9.8.1/32]",
	},
	"networkpolicy.NetworkPort.protocol": {
		about: "Without it: TCP.", values: []string{"TCP", "UDP", "SCTP"}, beside: "port: 80", example: "UDP",
	},
	"networkpolicy.NetworkPort.port": {
		about:   "Number, or name of a port that the receiving pod has. Without it: all of the protocol.",
		example: "80", other: "http",
	},
	"networkpolicy.NetworkPort.endPort": {
		about:   "Last port of a range that begins with port.",
		beside:  "port: 80",
		example: "90",
	},
}
