// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fields

const (
	learned   = "addresses of answers, or given to LearnNames; answers in audit mode teach nothing"
	forEgress = "only egress rules may have it"
	aNodes    = "Nodes, selected by the labels of their Node objects. " + unknownLabels
	onePeer   = "{namespaces: {}}"
	// unknownLabels describes the treatment of peers that are nodes.
	unknownLabels = "A node whose labels are not known is denied, and not allowed, by a rule that names labels."
	oneRule       = "ingress: [{action: Deny, from: [{namespaces: {}}]}]"
)

// adminRows are the rows of ClusterNetworkPolicy.
var adminRows = map[string]row{
	"adminpolicy.Policy.spec": {
		required: true,
		about:    "Subject and rules.",
		example:  "{tier: Admin, priority: 1, subject: {namespaces: {}}}",
	},
	"adminpolicy.Spec.tier": {
		required: true, about: "Whether the policy is evaluated before or after the policies of namespaces.",
		values: []string{"Admin", "Baseline"}, beside: oneRule, example: "Baseline", other: "Admin",
	},
	"adminpolicy.Spec.priority": {
		required: true,
		about:    "Order among the policies of the tier, from 0 to 1000: lower first.",
		beside:   oneRule,
		example:  "7",
		other:    "8",
	},
	"adminpolicy.Spec.subject": {
		required: true,
		about:    "Pods that the policy applies to.",
		example:  "{namespaces: {matchLabels: {a: b}}}",
		other:    "{namespaces: {}}",
	},
	"adminpolicy.Spec.ingress": {
		about:   "Rules for incoming connections, at most 25, in order.",
		example: "[{action: Deny, from: [{namespaces: {}}]}]",
		other:   "[]",
	},
	"adminpolicy.Spec.egress": {
		about:   "Rules for outgoing connections, at most 25, in order.",
		example: "[{action: Deny, to: [{namespaces: {}}]}]",
		other:   "[]",
	},
	"adminpolicy.Subject.namespaces": {
		about: "All pods of namespaces with these labels.", example: "{matchLabels: {a: b}}", other: "{}",
	},
	"adminpolicy.Subject.pods": {
		about:   "Pods with these labels in namespaces with these labels.",
		example: "{namespaceSelector: {}, podSelector: {matchLabels: {a: b}}}",
		other:   "{namespaceSelector: {}, podSelector: {}}",
	},
	"adminpolicy.NamespacedPod.namespaceSelector": {
		about:   "Namespaces, selected by label. Empty, or absent: all.",
		beside:  "podSelector: {}",
		example: "{matchLabels: {a: b}}",
		other:   "{}",
	},
	"adminpolicy.NamespacedPod.podSelector": {
		required: true, about: "Pods, selected by label. Empty: all.", example: "{matchLabels: {a: b}}", other: "{}",
	},
	"adminpolicy.IngressRule.name": {
		support: NoEffect,
		about:   "A descriptive name, at most 100 characters.",
		example: "x",
	},
	"adminpolicy.IngressRule.action": {
		required: true,
		about:    "Action for matching connections. Pass leaves the decision to the policies of the next tier.",
		values:   []string{"Accept", "Deny", "Pass"}, example: "Deny", other: "Accept",
	},
	"adminpolicy.IngressRule.from": {
		required: true,
		about:    "1 to 25 peers.",
		example:  "[" + onePeer + "]",
		other:    "[{namespaces: {matchLabels: {a: b}}}]",
	},
	"adminpolicy.IngressRule.protocols": {
		about: "Protocols and ports, at most 25. Absent: all.", example: "[{tcp: {destinationPort: {number: 80}}}]",
	},
	"adminpolicy.EgressRule.name": {
		support: NoEffect,
		about:   "A descriptive name, at most 100 characters.",
		example: "x",
	},
	"adminpolicy.EgressRule.action": {
		required: true,
		about:    "Action for matching connections. Pass leaves the decision to the policies of the next tier.",
		values:   []string{"Accept", "Deny", "Pass"}, example: "Deny", other: "Accept",
	},
	"adminpolicy.EgressRule.to": {
		required: true,
		about:    "1 to 25 peers.",
		example:  "[" + onePeer + "]",
		other:    "[{namespaces: {matchLabels: {a: b}}}]",
	},
	"adminpolicy.EgressRule.protocols": {
		about: "Protocols and ports, at most 25. Absent: all.", example: "[{tcp: {destinationPort: {number: 80}}}]",
	},
	"adminpolicy.IngressPeer.namespaces": {
		about: "All pods of namespaces with these labels.", example: "{matchLabels: {a: b}}", other: "{}",
	},
	"adminpolicy.IngressPeer.pods": {
		about:   "Pods with these labels in namespaces with these labels.",
		example: "{podSelector: {matchLabels: {a: b}}}",
		other:   "{podSelector: {}}",
	},
	"adminpolicy.EgressPeer.namespaces": {
		about: "All pods of namespaces with these labels.", example: "{matchLabels: {a: b}}", other: "{}",
	},
	"adminpolicy.EgressPeer.pods": {
		about:   "Pods with these labels in namespaces with these labels.",
		example: "{podSelector: {matchLabels: {a: b}}}",
		other:   "{podSelector: {}}",
	},
	"adminpolicy.EgressPeer.nodes": {
		setting: nodeLabels,
		about:   aNodes,
		example: "{matchLabels: {a: b}}",
		other:   "{}",
	},
	"adminpolicy.EgressPeer.networks": {
		about:   "Prefixes, at most 25, whether the addresses belong to pods, nodes or others.",
		example: "[10.9.8.0/24]", other: "[10.9.7.0/24]",
	},
	"adminpolicy.EgressPeer.domainNames": {
		becomes: learned,
		about:   "DNS names, or patterns such as *.example.com, at most 25; only with action Accept.",
		example: "[a.example.com]",
	},
	"adminpolicy.Protocol.tcp": {
		about:   "Ports of TCP.",
		example: "{destinationPort: {number: 80}}",
		other:   "{destinationPort: {number: 81}}",
	},
	"adminpolicy.Protocol.udp": {
		about:   "Ports of UDP.",
		example: "{destinationPort: {number: 80}}",
		other:   "{destinationPort: {number: 81}}",
	},
	"adminpolicy.Protocol.sctp": {
		about:   "Ports of SCTP.",
		example: "{destinationPort: {number: 80}}",
		other:   "{destinationPort: {number: 81}}",
	},
	"adminpolicy.Protocol.destinationNamedPort": {
		about: "Name of a port of the receiving pod.", example: "http", other: "dns",
	},
	"adminpolicy.Transport.destinationPort": {
		required: true,
		about:    "A port or a range.",
		example:  "{number: 80}",
		other:    "{number: 81}",
	},
	"adminpolicy.Port.number": {about: "A port, from 1 to 65535.", example: "80", other: "81"},
	"adminpolicy.Port.range": {
		about:   "A range of ports.",
		example: "{start: 80, end: 90}",
		other:   "{start: 80, end: 91}",
	},
	"adminpolicy.Range.start": {
		required: true,
		about:    "First port.",
		beside:   "end: 90",
		example:  "80",
		other:    "81",
	},
	"adminpolicy.Range.end": {
		required: true,
		about:    "Last port, greater than the first.",
		beside:   "start: 80",
		example:  "90",
		other:    "91",
	},
}

// oldAdminRows are the rows of AdminNetworkPolicy and BaselineAdminNetworkPolicy.
var oldAdminRows = map[string]row{
	"adminpolicy.OldPolicy.spec": {
		required: true, about: "Subject and rules.", example: "{priority: 1, subject: {namespaces: {}}}",
	},
	"adminpolicy.OldPolicy.spec@BaselineAdminNetworkPolicy": {
		required: true, about: "Subject and rules.", example: "{subject: {namespaces: {}}}",
	},
	"adminpolicy.OldSpec.priority": {
		required: true,
		about:    "Order among the policies of the tier, from 0 to 1000: lower first.",
		beside:   oneRule,
		example:  "7",
		other:    "8",
	},
	"adminpolicy.OldSpec.priority@BaselineAdminNetworkPolicy": {
		support: Refused,
		becomes: "a BaselineAdminNetworkPolicy has none",
		about:   "Order among policies.",
		example: "7",
	},
	"adminpolicy.OldSpec.subject": {
		required: true,
		about:    "Pods that the policy applies to.",
		example:  "{namespaces: {matchLabels: {a: b}}}",
		other:    "{namespaces: {}}",
	},
	"adminpolicy.OldSpec.ingress": {
		about:   "Rules for incoming connections, at most 100, in order.",
		example: "[{action: Deny, from: [{namespaces: {}}]}]",
		other:   "[]",
	},
	"adminpolicy.OldSpec.egress": {
		about:   "Rules for outgoing connections, at most 100, in order.",
		example: "[{action: Deny, to: [{namespaces: {}}]}]",
		other:   "[]",
	},
	"adminpolicy.OldIngressRule.name": {
		support: NoEffect,
		about:   "A descriptive name, at most 100 characters.",
		example: "x",
	},
	"adminpolicy.OldIngressRule.action": {
		required: true,
		about:    "Action for matching connections. Pass leaves the decision to the policies of the next tier.",
		values:   []string{"Allow", "Deny", "Pass"}, example: "Deny", other: "Allow",
	},
	"adminpolicy.OldIngressRule.action@BaselineAdminNetworkPolicy": {
		required: true, about: "Action for matching connections.",
		values: []string{"Allow", "Deny"}, example: "Deny", other: "Allow",
	},
	"adminpolicy.OldIngressRule.from": {
		required: true,
		about:    "1 to 100 peers.",
		example:  "[" + onePeer + "]",
		other:    "[{namespaces: {matchLabels: {a: b}}}]",
	},
	"adminpolicy.OldIngressRule.ports": {
		about: "Ports, at most 100. Absent: all ports of all protocols.", example: "[{portNumber: {port: 80}}]",
	},
	"adminpolicy.OldEgressRule.name": {
		support: NoEffect,
		about:   "A descriptive name, at most 100 characters.",
		example: "x",
	},
	"adminpolicy.OldEgressRule.action": {
		required: true,
		about:    "Action for matching connections. Pass leaves the decision to the policies of the next tier.",
		values:   []string{"Allow", "Deny", "Pass"}, example: "Deny", other: "Allow",
	},
	"adminpolicy.OldEgressRule.action@BaselineAdminNetworkPolicy": {
		required: true, about: "Action for matching connections.",
		values: []string{"Allow", "Deny"}, example: "Deny", other: "Allow",
	},
	"adminpolicy.OldEgressRule.to": {
		required: true,
		about:    "1 to 100 peers.",
		example:  "[" + onePeer + "]",
		other:    "[{namespaces: {matchLabels: {a: b}}}]",
	},
	"adminpolicy.OldEgressRule.ports": {
		about: "Ports, at most 100. Absent: all ports of all protocols.", example: "[{portNumber: {port: 80}}]",
	},
	"adminpolicy.OldPeer.namespaces": {
		about: "All pods of namespaces with these labels.", example: "{matchLabels: {a: b}}", other: "{}",
	},
	"adminpolicy.OldPeer.pods": {
		about:   "Pods with these labels in namespaces with these labels.",
		example: "{podSelector: {matchLabels: {a: b}}}",
		other:   "{podSelector: {}}",
	},
	"adminpolicy.OldPeer.nodes": {
		setting: nodeLabels,
		about:   aNodes,
		example: "{matchLabels: {a: b}}",
		other:   "{}",
	},
	"adminpolicy.OldPeer.nodes@from": {
		support: Refused,
		becomes: forEgress,
		instead: "namespaces: {}",
		about:   "Nodes.",
		example: "{}",
	},
	"adminpolicy.OldPeer.networks": {
		about:   "Prefixes, at most 25, whether the addresses belong to pods, nodes or others.",
		example: "[10.9.8.0/24]",
		other:   "[10.9.7.0/24]",
	},
	"adminpolicy.OldPeer.networks@from": {
		support: Refused,
		becomes: forEgress,
		instead: "namespaces: {}",
		about:   "Prefixes.",
		example: "[10.9.8.0/24]",
	},
	"adminpolicy.OldPeer.domainNames": {
		becomes: learned,
		about:   "DNS names, or patterns such as *.example.com, at most 25; only with action Allow.",
		example: "[a.example.com]",
	},
	"adminpolicy.OldPeer.domainNames@from": {
		support: Refused,
		becomes: forEgress,
		instead: "namespaces: {}",
		about:   "DNS names.",
		example: "[a.example.com]",
	},
	"adminpolicy.OldPeer.domainNames@BaselineAdminNetworkPolicy": {
		support: Refused,
		becomes: "a BaselineAdminNetworkPolicy has none",
		instead: "namespaces: {}",
		about:   "DNS names.",
		example: "[a.example.com]",
	},
	"adminpolicy.OldNamespaces.namespaceSelector": {
		about:   "Namespaces, selected by label, in the form of version 0.1.0 of the API.",
		example: "{matchLabels: {a: b}}",
		other:   "{}",
	},
	"adminpolicy.OldPods.namespaceSelector": {
		about:   "Namespaces, selected by label. Empty, or absent: all.",
		beside:  "podSelector: {}",
		example: "{matchLabels: {a: b}}",
		other:   "{}",
	},
	"adminpolicy.OldPods.namespaces": {
		about:   "Namespaces, in the form of version 0.1.0 of the API.",
		beside:  "podSelector: {}",
		example: "{matchLabels: {a: b}}",
		other:   "{}",
	},
	"adminpolicy.OldPods.podSelector": {
		required: true, about: "Pods, selected by label. Empty: all.", example: "{matchLabels: {a: b}}", other: "{}",
	},
	"adminpolicy.OldPort.portNumber": {about: "A port.", example: "{port: 80}", other: "{port: 81}"},
	"adminpolicy.OldPort.portRange": {
		about:   "A range of ports.",
		example: "{start: 80, end: 90}",
		other:   "{start: 80, end: 91}",
	},
	"adminpolicy.OldPort.namedPort": {
		about:   "Name of a port of the receiving pod.",
		example: "http",
		other:   "dns",
	},
	"adminpolicy.OldPortNumber.protocol": {
		about: "Without it: TCP.", values: []string{"TCP", "UDP", "SCTP"}, beside: "port: 80", example: "UDP",
	},
	"adminpolicy.OldPortNumber.port": {required: true, about: "A port, from 1 to 65535.", example: "80", other: "81"},
	"adminpolicy.OldPortRange.protocol": {
		about:   "Without it: TCP.",
		values:  []string{"TCP", "UDP", "SCTP"},
		beside:  "start: 80, end: 90",
		example: "UDP",
	},
	"adminpolicy.OldPortRange.start": {
		required: true,
		about:    "First port.",
		beside:   "end: 90",
		example:  "80",
		other:    "81",
	},
	"adminpolicy.OldPortRange.end": {
		required: true,
		about:    "Last port.",
		beside:   "start: 80",
		example:  "90",
		other:    "91",
	},
}
