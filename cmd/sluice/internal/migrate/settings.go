// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package migrate

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// setting compares one setting of Cilium.
type setting struct {
	config string // the key in cilium-config; empty: there is none
	helm   string // the path in Helm values; empty: there is none
	judge  func(r *report, from, value string)
}

func works(r *report, from, value, text string) {
	r.Works = append(r.Works, finding{from, value, text})
}

func differs(r *report, from, value, text string) {
	r.Differs = append(r.Differs, finding{from, value, text})
}

func missing(r *report, from, value, text string) {
	r.Missing = append(r.Missing, finding{from, value, text})
}

// lacks is a feature that Sluice does not have: only its use matters.
func lacks(text string) func(*report, string, string) {
	return func(r *report, from, value string) {
		if on(value) {
			missing(r, from, value, text)
		}
	}
}

// has is a feature that Sluice always has, with a text for a cluster in which it is off.
func has(text, off string) func(*report, string, string) {
	return func(r *report, from, value string) {
		switch {
		case on(value):
			works(r, from, value, text)
		case off != "":
			differs(r, from, value, off)
		}
	}
}

// sets gives a value of the chart the value of the setting.
func sets(path string, convert func(string) any) func(*report, string, string) {
	return func(r *report, from, value string) {
		if value == "" {
			return
		}
		v := convert(value)
		r.set(path, v)
		works(r, from, value, fmt.Sprintf("%s: %v", path, v))
	}
}

// on reports whether a value enables a feature.
func on(value string) bool {
	return !slices.Contains([]string{"", "false", "disabled", "none", "[]", "off"}, value)
}

func boolean(value string) any { return value == "true" }

func number(value string) any {
	if n, err := strconv.Atoi(value); err == nil {
		return n
	}
	return value
}

func words(value string) any {
	return strings.FieldsFunc(value, func(c rune) bool { return c == ' ' || c == ',' })
}

func text(value string) any { return value }

// settings are the settings of Cilium 1.16 to 1.20 that change what users see.
var settings = []setting{
	{"enable-ipv4", "ipv4.enabled", has("IPv4", "Sluice serves each family in spec.podCIDRs of the Node")},
	{"enable-ipv6", "ipv6.enabled", has("IPv6, if spec.podCIDRs of the Node has a prefix of it", "")},
	{"routing-mode", "routingMode", judgeRouting},
	{"tunnel", "tunnel", judgeTunnel}, // up to 1.14
	{"tunnel-protocol", "tunnelProtocol", judgeTunnelProtocol},
	{"tunnel-port", "tunnelPort", sets("containers.datapath.settings.routing.tunnelPort", number)},
	{"ipv4-native-routing-cidr", "ipv4NativeRoutingCIDR", judgeNativeRange},
	{"ipv6-native-routing-cidr", "ipv6NativeRoutingCIDR", judgeNativeRange},
	{"auto-direct-node-routes", "autoDirectNodeRoutes", has(
		"with routing: native, Sluice makes the routes on one link", "")},
	{"enable-ipv4-masquerade", "enableIPv4Masquerade", sets("settings.masquerade", boolean)},
	{"enable-ipv6-masquerade", "enableIPv6Masquerade", func(r *report, from, value string) {
		differs(r, from, value, "settings.masquerade is one setting for both families")
	}},
	{"enable-bpf-masquerade", "bpf.masquerade", func(r *report, from, value string) {
		if on(value) {
			differs(r, from, value, "Sluice masquerades by nftables and nf_conntrack")
		}
	}},
	{"enable-ip-masq-agent", "ipMasqAgent.enabled", lacks(
		"no ip-masq-agent; set its prefixes in settings.masqueradeExcept")},
	{"kube-proxy-replacement", "kubeProxyReplacement", judgeKubeProxy},
	{"bpf-lb-mode", "loadBalancer.mode", judgeLoadBalancerMode},
	{"node-port-mode", "nodePort.mode", judgeLoadBalancerMode},
	{"bpf-lb-acceleration", "loadBalancer.acceleration", lacks("no XDP; Services work without it")},
	{"bpf-lb-algorithm", "loadBalancer.algorithm", func(r *report, from, value string) {
		if value == "maglev" {
			differs(r, from, value, "consistent hashing only for Services with the annotation "+
				"sluice.io/load-balancing-algorithm: table")
			return
		}
		works(r, from, value, "random selection")
	}},
	{"enable-external-ips", "externalIPs.enabled", func(r *report, from, value string) {
		if on(value) {
			differs(r, from, value, "only addresses in settings.externalIPs, which is empty by default")
		}
	}},
	{"enable-host-port", "hostPort.enabled", has("host ports, by the capability portMappings", "")},
	{"enable-node-port", "nodePort.enabled", has("node ports", "")},
	{"enable-session-affinity", "sessionAffinity", has("session affinity", "")},
	{"enable-svc-source-range-check", "svcSourceRangeCheck", has("loadBalancerSourceRanges", "")},
	{"ipam", "ipam.mode", judgeIPAM},
	{"cluster-pool-ipv4-cidr", "ipam.operator.clusterPoolIPv4PodCIDRList", judgePool},
	{"cluster-pool-ipv6-cidr", "ipam.operator.clusterPoolIPv6PodCIDRList", judgePool},
	{"cluster-name", "cluster.name", sets("shared.cluster.name", text)},
	{"cluster-id", "cluster.id", func(r *report, from, value string) {
		if value != "0" && value != "" {
			missing(r, from, value, "no ClusterMesh: selectors of peers in other clusters match nothing")
		}
	}},
	{"enable-policy", "policyEnforcementMode", sets("containers.policy.settings.enforcement.mode", text)},
	{"policy-cidr-match-mode", "policyCIDRMatchMode", func(r *report, from, value string) {
		if strings.Contains(value, "nodes") {
			r.set("shared.cluster.cidrSelectsNodes", true)
			works(r, from, value, "shared.cluster.cidrSelectsNodes: true")
		}
	}},
	{"policy-audit-mode", "policyAuditMode", func(r *report, from, value string) {
		if on(value) {
			r.set("containers.datapath.settings.policy.audit", true)
			works(r, from, value, "containers.datapath.settings.policy.audit: true")
		}
	}},
	{"enable-k8s-networkpolicy", "", has("NetworkPolicy", "Sluice always enforces NetworkPolicy")},
	{"enable-l7-proxy", "l7Proxy", func(r *report, from, value string) {
		if on(value) {
			r.set("components.http.enabled", true)
			differs(r, from, value, "components.http.enabled: true. sluice-http evaluates egress rules for HTTP and TLS server "+
				"names. Give the files of the policies, too: ingress rules, TLS termination and listeners are listed below "+
				"Missing")
		}
	}},
	{"enable-hubble", "hubble.enabled", func(r *report, from, value string) {
		if on(value) {
			r.set("components.hubble.enabled", true)
			works(r, from, value, "components.hubble.enabled: true; its API is on a unix socket of each node")
		}
	}},
	{"", "hubble.relay.enabled", lacks("no relay; kubectl sluice observe shows all nodes")},
	{"", "hubble.ui.enabled", lacks("no UI")},
	{"enable-wireguard", "", lacks("no encryption: packets between nodes are in the clear")},
	{"enable-ipsec", "", lacks("no encryption: packets between nodes are in the clear")},
	{"", "encryption.enabled", lacks("no encryption: packets between nodes are in the clear")},
	{"enable-host-firewall", "hostFirewall.enabled", lacks(
		"no host firewall: policies with nodeSelector are refused, and the host is open")},
	{"enable-bandwidth-manager", "bandwidthManager.enabled", lacks(
		"no bandwidth limits; sluice-cni refuses the capability bandwidth")},
	{"enable-ipv4-egress-gateway", "egressGateway.enabled", lacks(
		"no egress gateway: traffic leaves with the address of its node")},
	{"enable-egress-gateway", "", lacks("no egress gateway: traffic leaves with the address of its node")},
	{"enable-local-redirect-policy", "localRedirectPolicy", lacks("no local redirect: traffic goes to the Service")},
	{"", "localRedirectPolicies.enabled", lacks("no local redirect: traffic goes to the Service")},
	{"enable-bgp-control-plane", "bgpControlPlane.enabled", lacks(
		"no BGP: use another BGP speaker for pod ranges and Services")},
	{"enable-l2-announcements", "l2announcements.enabled", lacks(
		"no L2 announcements: use another controller, such as MetalLB")},
	{"enable-gateway-api", "gatewayAPI.enabled", lacks("no Gateway API: run a gateway controller in pods")},
	{"enable-ingress-controller", "ingressController.enabled", lacks("no Ingress: run an ingress controller in pods")},
	{"enable-envoy-config", "envoyConfig.enabled", lacks("no CiliumEnvoyConfig")},
	{"mesh-auth-enabled", "authentication.enabled", func(r *report, from, value string) {
		if on(value) {
			differs(r, from, value, "no mutual authentication: a rule that asks for it allows nothing")
		}
	}},
	{"mesh-auth-mutual-enabled", "authentication.mutual.spire.enabled", lacks(
		"no mutual authentication: a rule that asks for it allows nothing")},
	{"enable-srv6", "", lacks("no SRv6")},
	{"enable-vtep", "vtep.enabled", lacks("no VTEP")},
	{"enable-nat46x64-gateway", "nat46x64Gateway.enabled", lacks("no NAT46 and NAT64")},
	{"enable-multicast", "multicast.enabled", lacks("no multicast")},
	{"mtu", "MTU", func(r *report, from, value string) {
		if value != "0" && value != "" {
			sets("containers.datapath.settings.mtu", number)(r, from, value)
		}
	}},
	{"devices", "devices", func(r *report, from, value string) {
		if value == "" {
			return
		}
		var devices []string
		for _, d := range words(value).([]string) {
			if name, ok := strings.CutSuffix(d, "+"); ok {
				d = name + "*"
			}
			devices = append(devices, d)
		}
		r.set("settings.underlayDevices", devices)
		differs(r, from, value, "settings.underlayDevices: "+strings.Join(devices, ",")+
			"; only devices that lead to other nodes")
	}},
	{"labels", "labels", func(r *report, from, value string) {
		if value != "" {
			differs(r, from, value, "another syntax: containers.identity.settings.labels.include and exclude")
		}
	}},
	{"identity-allocation-mode", "identityAllocationMode", func(r *report, from, value string) {
		differs(r, from, value, "identities are in an etcd that Sluice runs itself, or in settings.etcdEndpoints")
	}},
	{"cni-exclusive", "cni.exclusive", func(r *report, from, value string) {
		if on(value) {
			differs(r, from, value, "Sluice leaves other files; keep Cilium's agent off a node before Sluice starts there")
		}
	}},
	{"cni-chaining-mode", "cni.chainingMode", lacks("no chaining behind another plugin")},
	{"prometheus-serve-addr", "prometheus.enabled", func(r *report, from, value string) {
		if on(value) {
			differs(r, from, value, "components.monitoring.enabled, with Sluice's metrics")
		}
	}},
	{"tofqdns-min-ttl", "dnsProxy.minTtl", func(r *report, from, value string) {
		judgeKept(r, from, value, value+"s")
	}},
	{"tofqdns-idle-connection-grace-period", "dnsProxy.idleConnectionGracePeriod", func(r *report, from, value string) {
		judgeKept(r, from, value, value)
	}},
	{"tofqdns-max-deferred-connection-deletes", "dnsProxy.maxDeferredConnectionDeletes", ignored(
		"addresses in use stay as long as a connection uses them")},
	{"tofqdns-endpoint-max-ip-per-hostname", "dnsProxy.endpointMaxIpPerHostname", judgePerName},
	{"tofqdns-proxy-response-max-delay", "dnsProxy.proxyResponseMaxDelay", judgeHold},
	{"tofqdns-dns-reject-response-code", "dnsProxy.dnsRejectResponseCode", judgeRefusal},
	{"tofqdns-pre-cache", "dnsProxy.preCache", func(r *report, from, value string) {
		if value != "" {
			missing(r, from, value, "no file with names is read; sluice fqdn learn adds names")
		}
	}},
	{"tofqdns-proxy-port", "dnsProxy.proxyPort", ignored("DNS over UDP takes no port of the node")},
	{"tofqdns-enable-dns-compression", "dnsProxy.enableDnsCompression", ignored("answers pass unchanged")},
	{"tofqdns-preallocate-identities", "dnsProxy.preAllocateIdentities", ignored("addresses of names take no identities")},
	{"dnsproxy-enable-transparent-mode", "dnsProxy.enableTransparentMode", has(
		"the server sees the address and port of the pod", "the server sees the address and port of the pod")},
	{"dnsproxy-insecure-skip-transparent-mode-check", "", ignored("there is no such check")},
	{"dnsproxy-concurrency-limit", "", func(r *report, from, value string) {
		if value != "" && value != "0" {
			differs(r, from, value, "fixed limits for each pod: 512 open queries and 512 held answers; further answers "+
				"pass and teach nothing, and no query is refused")
		}
	}},
	{"dnsproxy-concurrency-processing-grace-period", "", ignored("no query waits for others")},
	{"dnsproxy-lock-count", "dnsProxy.lockCount", ignored("there are no such locks")},
	{"dnsproxy-lock-timeout", "dnsProxy.lockTimeout", ignored("there are no such locks")},
	{"dnsproxy-socket-linger-timeout", "dnsProxy.socketLingerTimeout", ignored("DNS over UDP uses no sockets")},
	{"", "k8sServiceHost", func(*report, string, string) {}}, // with the port
	{"", "k8sServicePort", func(*report, string, string) {}},
}

// ignored is a setting for which Sluice has no use, with the reason.
func ignored(why string) func(*report, string, string) {
	return func(r *report, from, value string) {
		if value != "" {
			works(r, from, value, "not needed: "+why)
		}
	}
}

// keptFor is the default of names.grace of sluice-policy.
const keptFor = 10 * time.Minute

// judgeKept compares how long addresses of names stay after their TTL at least.
func judgeKept(r *report, from, value, duration string) {
	d, err := time.ParseDuration(duration)
	switch {
	case err != nil:
	case d <= keptFor:
		works(r, from, value, fmt.Sprintf("addresses stay %s after their TTL", keptFor))
	default:
		r.kept = max(r.kept, min(d, 24*time.Hour))
		r.set("containers.policy.settings.names.grace", r.kept.String())
		works(r, from, value, "containers.policy.settings.names.grace: "+r.kept.String())
	}
}

// maxPerName is the maximum number of addresses of one name.
const maxPerName = 1024

func judgePerName(r *report, from, value string) {
	n, err := strconv.Atoi(value)
	switch {
	case err != nil:
	case n <= maxPerName:
		works(r, from, value, "a name has 1,024 addresses at most")
	default:
		differs(r, from, value, "a name has 1,024 addresses at most; further ones are not learned")
	}
}

func judgeHold(r *report, from, value string) {
	d, err := time.ParseDuration(value)
	if err != nil || d <= 0 {
		return
	}
	d = min(max(d, 100*time.Millisecond), 10*time.Second)
	r.set("containers.dns.settings.hold", d.String())
	works(r, from, value, "containers.dns.settings.hold: "+d.String())
}

func judgeRefusal(r *report, from, value string) {
	answer, ok := map[string]string{"refused": "refused", "nameError": "nxdomain"}[value]
	if !ok {
		return
	}
	r.set("containers.dns.settings.refusal", answer)
	works(r, from, value, "containers.dns.settings.refusal: "+answer+"; the default, auto, also serves search domains")
}

func judgeRouting(r *report, from, value string) {
	switch value {
	case "tunnel":
		r.set("settings.routing", "overlay")
		works(r, from, value, "settings.routing: overlay")
	case "native":
		r.set("settings.routing", "native")
		works(r, from, value, "settings.routing: native")
	default:
		missing(r, from, value, "routing is overlay or native")
	}
}

func judgeTunnel(r *report, from, value string) {
	if value == "disabled" {
		judgeRouting(r, from, "native")
		return
	}
	judgeRouting(r, from, "tunnel")
	judgeTunnelProtocol(r, from, value)
}

func judgeTunnelProtocol(r *report, from, value string) {
	switch value {
	case "vxlan", "":
		works(r, from, value, "VXLAN; the port is 4789, not 8472, unless tunnelPort is set")
	default:
		differs(r, from, value, "VXLAN is the only tunnel protocol")
	}
}

func judgeNativeRange(r *report, from, value string) {
	if value == "" {
		return
	}
	var all []string
	if of, ok := r.Values["settings"].(map[string]any); ok {
		all, _ = of["masqueradeExcept"].([]string)
	}
	if !slices.Contains(all, value) {
		all = append(all, value)
	}
	r.set("settings.masqueradeExcept", all)
	works(r, from, value, "settings.masqueradeExcept: "+strings.Join(all, ","))
}

func judgeKubeProxy(r *report, from, value string) {
	if slices.Contains([]string{"true", "strict", "partial", "probe"}, value) {
		r.set("settings.services", "on")
		works(r, from, value, `settings.services: "on"`)
		return
	}
	r.set("settings.services", "off")
	works(r, from, value, `settings.services: "off"; kube-proxy stays, and host ports need the plugin portmap`)
}

func judgeLoadBalancerMode(r *report, from, value string) {
	if value == "snat" || value == "" {
		works(r, from, value, "packets to backends on other nodes have the address of the node")
		return
	}
	missing(r, from, value, "no DSR: packets to backends on other nodes have the address of the node; "+
		"externalTrafficPolicy: Local keeps the address of the client")
}

func judgeIPAM(r *report, from, value string) {
	switch value {
	case "kubernetes":
		works(r, from, value, "ranges are spec.podCIDRs of each Node")
	case "cluster-pool", "cluster-pool-v2beta":
		differs(r, from, value, "ranges are spec.podCIDRs of each Node: kube-controller-manager needs --allocate-node-cidrs "+
			"and a --cluster-cidr that does not overlap Cilium's")
	default:
		missing(r, from, value, "ranges are spec.podCIDRs of each Node only")
	}
}

func judgePool(r *report, from, value string) {
	if value != "" {
		differs(r, from, value, "set another range as --cluster-cidr of kube-controller-manager; these addresses stay with "+
			"Cilium's nodes while you move")
	}
}

// addConfig adds the settings of cilium-config.
func (r *report) addConfig(data object) {
	for _, key := range sortedKeys(data) {
		i := slices.IndexFunc(settings, func(s setting) bool { return s.config == key })
		if i < 0 {
			r.NotCompared = append(r.NotCompared, key)
			continue
		}
		settings[i].judge(r, key, scalar(data[key]))
	}
}

// addValues adds Helm values.
func (r *report) addValues(values object) {
	flat := map[string]string{}
	flatten(values, "", flat)
	host, port := flat["k8sServiceHost"], flat["k8sServicePort"]
	if host != "" && host != "auto" {
		if port == "" {
			port = "443"
		}
		if strings.Contains(host, ":") {
			host = "[" + host + "]"
		}
		r.set("settings.kubernetesAPI", []string{"https://" + host + ":" + port})
		works(r, "k8sServiceHost", flat["k8sServiceHost"], "settings.kubernetesAPI: https://"+host+":"+port)
	}
	for _, path := range sortedKeys(flat) {
		i := slices.IndexFunc(settings, func(s setting) bool { return s.helm == path })
		if i < 0 {
			r.NotCompared = append(r.NotCompared, path)
			continue
		}
		settings[i].judge(r, path, flat[path])
	}
}

// flatten lists scalars, and lists of scalars, by their paths.
func flatten(v any, path string, flat map[string]string) {
	of, ok := v.(object)
	if !ok {
		flat[path] = scalar(v)
		return
	}
	for key, inner := range of {
		at := key
		if path != "" {
			at = path + "." + key
		}
		flatten(inner, at, flat)
	}
}

// scalar returns a value as text, and a list with commas.
func scalar(v any) string {
	switch v := v.(type) {
	case nil:
		return ""
	case []any:
		var items []string
		for _, item := range v {
			items = append(items, scalar(item))
		}
		return strings.Join(items, ",")
	}
	return fmt.Sprint(v)
}

func sortedKeys[V any](m map[string]V) []string {
	keys := make([]string, 0, len(m))
	for key := range m {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	return keys
}

// foreign are kinds of Cilium without effect, with the consequence.
var foreign = map[string]string{
	"CiliumEgressGatewayPolicy":    "traffic leaves with the address of its node, past the gateway",
	"CiliumLocalRedirectPolicy":    "traffic goes to the Service",
	"CiliumEnvoyConfig":            "there is no proxy",
	"CiliumClusterwideEnvoyConfig": "there is no proxy",
	"CiliumLoadBalancerIPPool":     "", // sluice-controller assigns its addresses
	"CiliumL2AnnouncementPolicy":   "addresses are not announced",
	"CiliumBGPPeeringPolicy":       "addresses of Services and pod ranges are not announced",
	"CiliumBGPClusterConfig":       "addresses of Services and pod ranges are not announced",
	"CiliumBGPPeerConfig":          "addresses of Services and pod ranges are not announced",
	"CiliumBGPAdvertisement":       "addresses of Services and pod ranges are not announced",
	"CiliumBGPNodeConfig":          "addresses of Services and pod ranges are not announced",
	"CiliumBGPNodeConfigOverride":  "addresses of Services and pod ranges are not announced",
	"CiliumPodIPPool":              "ranges are spec.podCIDRs of each Node",
	"CiliumNodeConfig":             "settings are the same on all nodes",
	"CiliumGatewayClassConfig":     "there is no Gateway API",
	"CiliumVTEPConfig":             "there is no VTEP",
	"CiliumNode":                   "",
	"CiliumEndpoint":               "",
	"CiliumEndpointSlice":          "",
	"CiliumIdentity":               "",
}

// addForeign adds an object of cilium.io that is no policy. Objects with Cilium's own state have no line.
func (r *report) addForeign(kind string, o object) {
	consequence, known := foreign[kind]
	switch {
	case !known:
		missing(r, nameOf(o), "", "Sluice does not know the kind; it has no effect")
	case consequence != "":
		missing(r, nameOf(o), "", "has no effect: "+consequence)
	}
}

// addAnnotations adds annotations without effect.
func (r *report) addAnnotations(o object) {
	metadata, _ := o["metadata"].(object)
	annotations, _ := metadata["annotations"].(object)
	for _, key := range sortedKeys(annotations) {
		for _, prefix := range []string{
			"service.cilium.io/", "io.cilium/", "policy.cilium.io/", "network.cilium.io/",
			"kubernetes.io/ingress-bandwidth", "kubernetes.io/egress-bandwidth",
		} {
			if strings.HasPrefix(key, prefix) && !strings.HasPrefix(key, "io.cilium/lb-ipam-") {
				missing(r, nameOf(o), "", "the annotation "+key+" has no effect")
			}
		}
	}
}
