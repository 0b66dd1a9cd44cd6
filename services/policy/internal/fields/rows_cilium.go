// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fields

const (
	allowsNothing = "the rule allows nothing"
	deniesAll     = "the rule denies all peers, on the ports that it names"
	dropped       = "packets that match are redirected to no proxy, and dropped"
	refused       = "sluice-http refuses what matches"
	httpNothing   = "the HTTP rule allows nothing"
	cNodes        = "Other nodes, selected by the labels of their Node objects. " + unknownLabels
	evaluatedDNS  = "DNS over UDP and TCP; audit mode bypasses the proxy"
	evaluatedHTTP = "over TCP; packets of other protocols that match are dropped; audit mode bypasses the proxy"
	port53        = "ports: [{port: '53', protocol: UDP}]"
	port80        = "ports: [{port: '80', protocol: TCP}]"
)

// entities lists the values of fromEntities and toEntities.
var entities = []string{
	"all", "world", "cluster", "cluster-mesh", "host", "init", "ingress", "unmanaged",
	"remote-node", "health", "none", "kube-apiserver",
}

// ciliumRows are the rows of CiliumNetworkPolicy, CiliumClusterwideNetworkPolicy and CiliumCIDRGroup.
var ciliumRows = map[string]row{
	"cilium.NetworkPolicy.spec": {
		about:   "Subject and rules. Either spec or specs is required.",
		example: "{endpointSelector: {matchLabels: {app: db}}, ingress: [{}]}",
		other:   "{endpointSelector: {}, ingress: [{}]}",
	},
	"cilium.NetworkPolicy.specs": {
		about:   "List of specs.",
		example: "[{endpointSelector: {matchLabels: {app: db}}, ingress: [{}]}]", other: "[]",
	},
	"cilium.Rule.endpointSelector": {
		required: true,
		about: "Pods that the rules apply to, selected by label; only pods of the policy's namespace if it has " +
			"one. Empty: all.",
		beside: "ingress: [{}]", example: "{matchLabels: {app: db}}", other: "{}",
	},
	"cilium.Rule.nodeSelector": {
		support: Refused, becomes: "rules for nodes (the host firewall) are not supported",
		about: "Nodes that the rules apply to, instead of pods.", beside: "ingress: [{}]", example: "{}",
	},
	"cilium.Rule.ingress": {
		about:   "Incoming connections that are allowed.",
		beside:  "egress: [{}]",
		example: "[{fromEntities: [world]}]",
	},
	"cilium.Rule.ingressDeny": {
		about:   "Incoming connections that are denied, even if another rule allows them.",
		beside:  "egress: [{}]",
		example: "[{fromEntities: [world]}]",
	},
	"cilium.Rule.egress": {
		about:   "Outgoing connections that are allowed.",
		beside:  "ingress: [{}]",
		example: "[{toEntities: [world]}]",
	},
	"cilium.Rule.egressDeny": {
		about:   "Outgoing connections that are denied, even if another rule allows them.",
		beside:  "ingress: [{}]",
		example: "[{toEntities: [world]}]",
	},
	"cilium.Rule.labels": {
		support: NoEffect,
		about:   "Labels of the rule itself.",
		beside:  "ingress: [{}]",
		example: "[{key: a, value: b, source: k8s}]",
	},
	"cilium.Rule.enableDefaultDeny": {
		about:   "Whether connections that no rule matches are denied. Default: in the directions that have rules.",
		beside:  "ingress: [{}]",
		example: "{ingress: false}",
	},
	"cilium.Rule.description": {
		support: NoEffect,
		about:   "Free text.",
		beside:  "ingress: [{}]",
		example: "x",
	},
	"cilium.Rule.log": {
		support: NoEffect,
		about:   "A text for flow logs. It is not used; a note reports this.",
		beside:  "ingress: [{}]",
		example: "{value: x}",
	},
	"cilium.DefaultDeny.ingress": {about: "For incoming connections.", example: "false", other: "true"},
	"cilium.DefaultDeny.egress":  {about: "For outgoing connections.", example: "true", other: "false"},
	"cilium.Label.key":           {required: true, about: "Key of the label.", example: "a"},
	"cilium.Label.value":         {about: "Value of the label.", beside: "key: a", example: "b"},
	"cilium.Label.source":        {about: "Source of the label.", beside: "key: a", example: "k8s"},
	"cilium.Log.value":           {about: "The text, at most 32 characters.", example: "x"},

	"cilium.IngressPeers.fromEndpoints": {
		about:   "Pods, selected by label, in the policy's namespace unless the selector names a namespace. Empty: none.",
		example: "[{matchLabels: {app: web}}]", other: "[{}]",
	},
	"cilium.IngressPeers.fromCIDR": {
		about:   "Prefixes outside of the cluster.",
		example: "[10.9.8.0/24]",
		other:   "[10.9.7.0/24]",
	},
	"cilium.IngressPeers.fromCIDRSet": {
		about:   "Prefixes with exceptions, and groups of prefixes.",
		example: "[{cidr: 10.9.8.0/24}]",
		other:   "[{cidr: 10.9.7.0/24}]",
	},
	"cilium.IngressPeers.fromEntities": {
		about: "Peers by entity.", values: entities, example: "[world]", other: "[cluster]",
	},
	"cilium.IngressPeers.fromNodes": {
		setting: nodeLabels, about: cNodes, example: "[{matchLabels: {a: b}}]", other: "[{}]",
	},
	"cilium.IngressPeers.fromRequires": {
		support: Refused,
		becomes: "Cilium has removed the field; an empty list is accepted",
		about:   "Additional labels that peers must have.",
		example: "[{matchLabels: {a: b}}]",
	},
	"cilium.IngressRule.fromGroups": {
		support: Converted,
		becomes: allowsNothing,
		about:   "Groups of a cloud provider.",
		example: "[{aws: {securityGroupsIds: [x]}}]",
	},
	"cilium.IngressDenyRule.fromGroups": {
		support: Converted,
		becomes: deniesAll,
		about:   "Groups of a cloud provider.",
		example: "[{aws: {securityGroupsIds: [x]}}]",
	},
	"cilium.IngressRule.toPorts": {
		about:   "Ports, and the requests that are allowed on layer 7. Absent: all.",
		beside:  "fromEntities: [world]",
		example: "[{" + port80 + "}]",
	},
	"cilium.IngressRule.icmps": {
		about:   "Types of ICMP.",
		beside:  "fromEntities: [world]",
		example: "[{fields: [{type: 8}]}]",
	},
	"cilium.IngressRule.authentication": {
		support: Converted,
		becomes: allowsNothing + ", but for mode disabled",
		about:   "Mutual authentication of the peer.",
		beside:  "fromEntities: [world]", example: "{mode: required}",
	},
	"cilium.IngressDenyRule.toPorts": {
		about:   "Ports. Absent: all.",
		beside:  "fromEntities: [world]",
		example: "[{" + port80 + "}]",
	},
	"cilium.IngressDenyRule.icmps": {
		about:   "Types of ICMP.",
		beside:  "fromEntities: [world]",
		example: "[{fields: [{type: 8}]}]",
	},

	"cilium.EgressPeers.toEndpoints": {
		about:   "Pods, selected by label, in the policy's namespace unless the selector names a namespace. Empty: none.",
		example: "[{matchLabels: {app: web}}]", other: "[{}]",
	},
	"cilium.EgressPeers.toCIDR": {
		about:   "Prefixes outside of the cluster.",
		example: "[10.9.8.0/24]",
		other:   "[10.9.7.0/24]",
	},
	"cilium.EgressPeers.toCIDRSet": {
		about:   "Prefixes with exceptions, and groups of prefixes.",
		example: "[{cidr: 10.9.8.0/24}]",
		other:   "[{cidr: 10.9.7.0/24}]",
	},
	"cilium.EgressPeers.toEntities": {
		about:   "Peers by entity.",
		values:  entities,
		example: "[world]",
		other:   "[cluster]",
	},
	"cilium.EgressPeers.toNodes": {
		setting: nodeLabels, about: cNodes, example: "[{matchLabels: {a: b}}]", other: "[{}]",
	},
	"cilium.EgressPeers.toRequires": {
		support: Refused,
		becomes: "Cilium has removed the field; an empty list is accepted",
		about:   "Additional labels that peers must have.",
		example: "[{matchLabels: {a: b}}]",
	},
	"cilium.EgressRule.toServices": {
		support: Converted,
		becomes: allowsNothing,
		about:   "Backends of services.",
		example: "[{k8sService: {serviceName: db, namespace: shop}}]",
	},
	"cilium.EgressRule.toGroups": {
		support: Converted,
		becomes: allowsNothing,
		about:   "Groups of a cloud provider.",
		example: "[{aws: {securityGroupsIds: [x]}}]",
	},
	"cilium.EgressDenyRule.toServices": {
		support: Converted,
		becomes: deniesAll,
		about:   "Backends of services.",
		example: "[{k8sService: {serviceName: db, namespace: shop}}]",
	},
	"cilium.EgressDenyRule.toGroups": {
		support: Converted,
		becomes: deniesAll,
		about:   "Groups of a cloud provider.",
		example: "[{aws: {securityGroupsIds: [x]}}]",
	},
	"cilium.EgressRule.toFQDNs": {
		becomes: learned,
		about:   "DNS names and patterns. Without the setting dns.proxy, only LearnNames adds addresses.",
		example: "[{matchName: a.example.com}]",
	},
	"cilium.EgressRule.toPorts": {
		about:   "Ports, and the requests that are allowed on layer 7. Absent: all.",
		beside:  "toEntities: [world]",
		example: "[{" + port80 + "}]",
	},
	"cilium.EgressRule.icmps": {
		about:   "Types of ICMP.",
		beside:  "toEntities: [world]",
		example: "[{fields: [{type: 8}]}]",
	},
	"cilium.EgressRule.authentication": {
		support: Converted,
		becomes: allowsNothing + ", but for mode disabled",
		about:   "Mutual authentication of the peer.",
		beside:  "toEntities: [world]", example: "{mode: required}",
	},
	"cilium.EgressDenyRule.toPorts": {
		about:   "Ports. Absent: all.",
		beside:  "toEntities: [world]",
		example: "[{" + port80 + "}]",
	},
	"cilium.EgressDenyRule.icmps": {
		about:   "Types of ICMP.",
		beside:  "toEntities: [world]",
		example: "[{fields: [{type: 8}]}]",
	},
	"cilium.Authentication.mode": {
		required: true,
		about:    "Mode of authentication; disabled requires none.",
		values:   []string{"disabled", "required", "test-always-fail"},
		example:  "required",
	},

	"cilium.CIDRRule.cidr": {
		about:   "A prefix. Exactly one of cidr, cidrGroupRef and cidrGroupSelector is required.",
		example: "10.9.8.0/24",
		other:   "10.9.7.0/24",
	},
	"cilium.CIDRRule.cidrGroupRef": {about: "Name of a CiliumCIDRGroup.", example: "a", other: "b"},
	"cilium.CIDRRule.cidrGroupSelector": {
		about: "CiliumCIDRGroups, selected by label.", example: "{matchLabels: {a: b}}", other: "{matchLabels: {a: c}}",
	},
	"cilium.CIDRRule.except": {
		about:   "Prefixes that are excluded.",
		beside:  "cidr: 10.9.8.0/24",
		example: "[10.9.8.1/32]",
	},
	"cilium.Service.k8sService": {
		about:   "A service by its name.",
		example: "{serviceName: db, namespace: shop}",
	},
	"cilium.Service.k8sServiceSelector": {
		about:   "Services, selected by label.",
		example: "{selector: {matchLabels: {a: b}}}",
	},
	"cilium.ServiceName.namespace": {
		about:   "Namespace of the service.",
		beside:  "serviceName: db",
		example: "shop",
	},
	"cilium.ServiceName.serviceName": {about: "Name of the service.", example: "db"},
	"cilium.ServiceSelector.namespace": {
		about:   "Namespace of the services.",
		beside:  "selector: {}",
		example: "shop",
	},
	"cilium.ServiceSelector.selector": {
		required: true,
		about:    "Labels of the services.",
		example:  "{matchLabels: {a: b}}",
	},
	"cilium.FQDN.matchName@toFQDNs":    named(learned),
	"cilium.FQDN.matchName@dns":        named(evaluatedDNS),
	"cilium.FQDN.matchPattern@toFQDNs": pattern(learned),
	"cilium.FQDN.matchPattern@dns":     pattern(evaluatedDNS),
	"cilium.PortRule.ports": {
		about:   "Ports.",
		example: "[{port: '80', protocol: TCP}]",
		other:   "[{port: '81', protocol: TCP}]",
	},
	"cilium.PortRule.terminatingTLS@ingress": proxied(
		"Key material to terminate the client's TLS.", "{secret: {name: x, namespace: y}}",
	),
	"cilium.PortRule.terminatingTLS@egress": unterminated(
		"Key material to terminate the client's TLS.", "{secret: {name: x, namespace: y}}",
	),
	"cilium.PortRule.originatingTLS@ingress": proxied(
		"Key material to originate TLS to the server.", "{secret: {name: x, namespace: y}}",
	),
	"cilium.PortRule.originatingTLS@egress": unterminated(
		"Key material to originate TLS to the server.", "{secret: {name: x, namespace: y}}",
	),
	"cilium.PortRule.serverNames@egress": {
		becomes: evaluatedHTTP,
		about:   "Names of TLS servers that are allowed. Without the setting http.proxy, packets that match are dropped.",
		beside:  port80,
		example: "[a.example.com]",
	},
	"cilium.PortRule.serverNames@ingress": proxied("Names of TLS servers that are allowed.", "[a.example.com]"),
	"cilium.PortRule.listener":            proxied("A proxy of the user.", "{envoyConfig: {name: x}, name: y}"),
	"cilium.PortRule.listener@ingress": {
		support: Refused,
		becomes: forEgress,
		about:   "A proxy of the user.",
		beside:  port80,
		example: "{envoyConfig: {name: x}, name: y}",
	},
	"cilium.PortRule.rules@ingress": proxied("Requests that are allowed.", "{http: [{path: /}]}"),
	"cilium.PortRule.rules@egress": {
		about:   "Requests that are allowed; http or dns.",
		beside:  port53,
		example: "{dns: [{matchName: a.example.com}]}",
	},
	"cilium.PortDenyRule.ports": {
		about:   "Ports.",
		example: "[{port: '80', protocol: TCP}]",
		other:   "[{port: '81', protocol: TCP}]",
	},
	"cilium.PortProtocol.port": {
		about: "Port number, 0 for all, or the name of a port of the receiving pod. Protocols without ports " +
			"need none.",
		beside:  "protocol: TCP",
		example: "'80'",
		other:   "http",
	},
	"cilium.PortProtocol.endPort": {
		about:   "Last port of a range that starts with port.",
		beside:  "port: '80', protocol: TCP",
		example: "90",
	},
	"cilium.PortProtocol.protocol": {
		about:   "Without it: ANY, which is TCP, UDP and SCTP.",
		values:  []string{"TCP", "UDP", "SCTP", "VRRP", "IGMP", "GRE", "IPIP", "IPV6", "ESP", "AH", "ANY"},
		beside:  "port: '80'",
		example: "UDP",
	},
	"cilium.TLS.secret": {
		required: true,
		about:    "A Kubernetes secret.",
		example:  "{name: x, namespace: y}",
	},
	"cilium.TLS.trustedCA": {
		about:   "Key of the certificate authority in the secret.",
		beside:  "secret: {name: x}",
		example: "ca.crt",
	},
	"cilium.TLS.certificate": {
		about:   "Key of the certificate in the secret.",
		beside:  "secret: {name: x}",
		example: "tls.crt",
	},
	"cilium.TLS.privateKey": {
		about:   "Key of the private key in the secret.",
		beside:  "secret: {name: x}",
		example: "tls.key",
	},
	"cilium.Secret.namespace": {about: "Namespace of the secret.", beside: "name: x", example: "y"},
	"cilium.Secret.name":      {required: true, about: "Name of the secret.", example: "x"},
	"cilium.Listener.envoyConfig": {
		required: true,
		about:    "Configuration of the proxy.",
		beside:   "name: y",
		example:  "{name: x}",
	},
	"cilium.Listener.name": {
		required: true,
		about:    "Name of the listener in it.",
		beside:   "envoyConfig: {name: x}",
		example:  "y",
	},
	"cilium.Listener.priority": {
		about:   "Order among listeners, from 1 to 100.",
		beside:  "envoyConfig: {name: x}, name: y",
		example: "1",
	},
	"cilium.EnvoyConfig.kind": {
		about:   "Kind of the configuration.",
		values:  []string{"CiliumEnvoyConfig", "CiliumClusterwideEnvoyConfig"},
		beside:  "name: x",
		example: "CiliumEnvoyConfig",
	},
	"cilium.EnvoyConfig.name": {required: true, about: "Name of the configuration.", example: "x"},
	"cilium.L7Rules.http@egress": {
		becomes: evaluatedHTTP,
		about:   "HTTP requests. Without the setting http.proxy, packets that match are dropped.",
		outer:   port80,
		example: "[{path: /}]",
	},
	"cilium.L7Rules.http@ingress": {
		support: Converted,
		becomes: dropped,
		about:   "HTTP requests.",
		outer:   port80,
		example: "[{path: /}]",
	},
	"cilium.L7Rules.dns": {
		becomes: evaluatedDNS,
		about:   "DNS queries. Without the setting dns.proxy, a list with the pattern * allows its ports, and others drop.",
		example: "[{matchName: a.example.com}]",
	},
	"cilium.L7Rules.dns@ingress": {
		support: Refused,
		becomes: forEgress,
		instead: "http: [{path: /}]",
		about:   "DNS questions.",
		example: "[{matchName: a.example.com}]",
	},
	"cilium.HTTPRule.path":          {about: "Regular expression of the path.", example: "/"},
	"cilium.HTTPRule.method":        {about: "Regular expression of the method.", example: "GET"},
	"cilium.HTTPRule.host":          {about: "Regular expression of the host.", example: "a.example.com"},
	"cilium.HTTPRule.headers":       {about: "Headers that must be present.", example: "[X-A]"},
	"cilium.HTTPRule.headerMatches": {about: "Headers with their values.", example: "[{name: X-A, value: b}]"},
	"cilium.HeaderMatch.mismatch": {
		about:   "Action if the value differs.",
		values:  []string{"LOG", "ADD", "DELETE", "REPLACE"},
		beside:  "name: X-A",
		example: "LOG",
	},
	"cilium.HeaderMatch.name": {required: true, about: "Name of the header.", example: "X-A"},
	"cilium.HeaderMatch.secret@ingress": {
		about:   "Secret with the value.",
		beside:  "name: X-A",
		example: "{name: x}",
	},
	"cilium.HeaderMatch.secret@egress": {
		support: Converted,
		becomes: httpNothing,
		about:   "Secret with the value.",
		beside:  "name: X-A",
		example: "{name: x}",
	},
	"cilium.HeaderMatch.value": {about: "The value.", beside: "name: X-A", example: "b"},
	"cilium.ICMPRule.fields":   {about: "Types, at most 40.", example: "[{type: 8}]", other: "[{type: 0}]"},
	"cilium.ICMPField.family": {
		about:   "Without it: IPv4.",
		values:  []string{"IPv4", "IPv6"},
		beside:  "type: 128",
		example: "IPv6",
	},
	"cilium.ICMPField.type": {
		required: true,
		about:    "A number or a name such as EchoRequest; 0 is every type.",
		example:  "8",
		other:    "EchoReply",
	},
	"cilium.CIDRGroup.spec": {
		required: true,
		about:    "The prefixes.",
		example:  "{externalCIDRs: [10.9.8.0/24]}",
		other:    "{externalCIDRs: []}",
	},
	"cilium.CIDRGroupSpec.externalCIDRs": {
		required: true,
		about:    "Prefixes of the group.",
		example:  "[10.9.8.0/24]",
		other:    "[]",
	},
}

func named(becomes string) row {
	return row{becomes: becomes, about: "A DNS name.", example: "a.example.com"}
}

func pattern(becomes string) row {
	return row{
		becomes: becomes,
		about:   "A pattern: * matches any part of one label, **. at the start one or more labels, and * alone every name.",
		example: "'*.example.com'",
	}
}

// unterminated returns the row of a field about TLS that a proxy would have to end.
func unterminated(about, example string) row {
	return row{support: Converted, becomes: refused, about: about, beside: port80, example: example}
}

// proxied returns the row of a field that would need a proxy.
func proxied(about, example string) row {
	return row{support: Converted, becomes: dropped, about: about, beside: port80, example: example}
}
