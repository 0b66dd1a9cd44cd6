// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// passing matches times and durations, which differ between runs.
var passing = regexp.MustCompile(`"\d{4}-\d\d-\d\dT[^"]*"|\d\d:\d\d:\d\d\.\d{3}|\b(?:1m)?\d+(?:\.\d+)?(?:ms|µs|s)\b`)

// TestOutputsAreThoseListed compares what commands print and their exit codes
// with a file, as tables and as JSON.
func TestOutputsAreThoseListed(t *testing.T) {
	t.Setenv("SLUICE_INSTANCE", "")
	t.Setenv("PATH", "")
	n := nodetest.New(t, commands...)
	n.Differences = []*datapathv1.Difference{{Subject: "pin", Key: "sl_ct", Want: "a map", Have: "nothing"}}
	n.Flows = []*datapathv1.Flow{{
		Type: datapathv1.FlowType_FLOW_TYPE_CONNECTION_CLOSED, Time: timestamppb.New(time.Unix(1e9, 0)),
		Verdict:   datapathv1.Verdict_VERDICT_FORWARDED,
		Direction: netv1.Direction_DIRECTION_INGRESS, Protocol: 6, TcpFlags: 0x12, Reply: true,
		Source: &datapathv1.FlowEnd{
			Address: "10.244.0.2", Port: 4000, Identity: 300, Labels: []*workloadv1.Label{nodetest.Label("app", "web")},
		},
		Destination: &datapathv1.FlowEnd{Address: "10.244.0.3", Port: 80},
		Ingress: &datapathv1.SideVerdict{
			Verdict: datapathv1.Verdict_VERDICT_FORWARDED, Table: 17, Rule: 1, DecidedBy: netv1.DecidedBy_DECIDED_BY_RULE,
			RuleSources: []string{"NetworkPolicy shop/web"},
		},
	}, {
		Type: datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT, Time: timestamppb.New(time.Unix(1e9, 0)),
		Verdict: datapathv1.Verdict_VERDICT_FORWARDED, Reason: datapathv1.Reason_REASON_FORWARDED_TO_POD,
		Direction: netv1.Direction_DIRECTION_EGRESS, Protocol: 17,
		Source:                     &datapathv1.FlowEnd{Address: "10.244.0.2", Port: 4000, Identity: 300},
		Destination:                &datapathv1.FlowEnd{Address: "10.244.0.3", Port: 5353, Identity: 301},
		OriginalDestinationAddress: "10.96.0.10", OriginalDestinationPort: 53, Service: "shop/dns:dns",
	}}
	n.Explained = map[string]*datapathv1.ExplainResponse{"10.96.0.10": {
		Source: &datapathv1.ExplainedPeer{Identity: 300, Known: true, IdentityClass: 4, IpcachePrefix: "10.244.0.2/32"},
		Service: &datapathv1.ExplainedService{
			Service: "shop/web:http", Address: "10.96.0.10", Port: 80, Kind: datapathv1.FrontendKind_FRONTEND_KIND_CLUSTER_IP,
			Outcome: datapathv1.ServiceOutcome_SERVICE_OUTCOME_TRANSLATED, BackendCount: 2,
			Backends: []*datapathv1.ExplainedBackend{{
				Address: "10.244.0.3", Port: 8080, Path: datapathv1.BackendPath_BACKEND_PATH_EVALUATED,
				Verdict: datapathv1.Verdict_VERDICT_DROPPED, Reason: datapathv1.Reason_REASON_POLICY_DENIED,
				Peer: &datapathv1.ExplainedPeer{Identity: 301, Known: true, IdentityClass: 5, IpcachePrefix: "10.244.0.3/32"},
				Ingress: &datapathv1.ExplainedSide{Verdict: &datapathv1.SideVerdict{
					Verdict: datapathv1.Verdict_VERDICT_DROPPED, Table: 17, Rule: 1,
					DecidedBy: netv1.DecidedBy_DECIDED_BY_RULE, RuleSources: []string{"NetworkPolicy shop/web"},
				}},
			}, {
				Address: "10.244.0.2", Port: 8080, Path: datapathv1.BackendPath_BACKEND_PATH_OWN_NAMESPACE,
				Verdict: datapathv1.Verdict_VERDICT_FORWARDED, Peer: &datapathv1.ExplainedPeer{IpcachePrefix: "10.244.0.2/32"},
			}},
		},
	}}
	n.Policy.Differences = []*policyv1.DiffResponse{{
		Subject: 300, SubjectLabels: []*workloadv1.Label{nodetest.Label("app", "web")},
		Direction: netv1.Direction_DIRECTION_INGRESS,
		Peers: []*policyv1.DiffPeer{
			{Identity: 301, Labels: []*workloadv1.Label{nodetest.Label("app", "db")}, Prefix: "10.244.0.3/32"},
			{Prefix: "192.0.2.0/24"},
		},
		Ports: []*policyv1.DiffPorts{{
			FirstProtocol: 6, LastProtocol: 6, FirstPort: 80, LastPort: 81,
			Before: policyv1.Action_ACTION_ALLOW, After: policyv1.Action_ACTION_DENY,
		}},
	}}
	n.Policy.Table = &policyv1.GetPolicyTableResponse{Revision: 6, Ingress: &policyv1.PolicyTable{
		StructureHash: []byte{1, 2},
		Rules:         []*policyv1.TableRule{{Action: policyv1.Action_ACTION_ALLOW, Tier: policyv1.Tier_TIER_NORMAL}},
		Classes:       []*policyv1.PeerClass{{Ranges: []*policyv1.PortRange{{First: 6<<16 | 80, Last: 6<<16 | 80, Rest: 1}}}},
		Peers:         []*policyv1.PeerRow{{IdentityClass: 4, Class: 0}},
	}, IngressRules: []*policyv1.RuleSources{{Sources: []*policyv1.RuleSource{{
		Kind: "NetworkPolicy", Namespace: "shop",
		Name: "web", Path: "spec.ingress[0]",
	}}}}}
	n.Connections = []*datapathv1.BackendConnections{{
		Address: "10.244.0.3", Port: 8080, Protocol: netv1.Protocol_PROTOCOL_TCP, ConnectionCount: 1200,
	}}
	n.Pod = &workloadv1.PodReference{Namespace: "shop", Name: "web-0", Uid: "u"}
	dir := t.TempDir()
	file := nodetest.Write(t, dir, "web.yaml", nodetest.WebPolicy)
	bad := nodetest.Write(t, dir, "bad.yaml", strings.Replace(nodetest.WebPolicy, "podSelector: {}", "refuse: why", 1))
	web := nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebService)
	wrong := nodetest.Write(t, filepath.Dir(web), "wrong.yaml",
		strings.Replace(nodetest.WebService, "port: 80", "refuse: why", 1))
	broken := nodetest.Write(t, dir, "broken.yaml", "a: [\n")
	cilium := nodetest.Write(t, dir, "cilium.yaml", "routingMode: tunnel\nbpf: {masquerade: true}\n"+
		"egressGateway: {enabled: true}\noperator: {replicas: 1}\n")

	var got strings.Builder
	keys := map[string]map[string]bool{}
	for _, line := range []string{
		"status", "config ipam", "config ipam --changed", "config x",
		"endpoint list", "endpoint get 0123", "endpoint get x", "endpoint history",
		"endpoint check 0123", "endpoint check evil", "endpoint check x", "endpoint delete 0123",
		"endpoint delete 0123 --force", "endpoint delete evil --dry-run",
		"endpoint delete unreadable/eth0", "endpoint delete x",
		"endpoint audit-mode --node off", "endpoint audit-mode 0123 off", "endpoint audit-mode",
		"identity list", "identity list --all",
		"identity get 300", "identity get 301", "identity get x", "identity top-labels",
		"ip get 10.244.0.2", "ip get 10.244.0.9", "ip get 192.0.2.7", "ip get 203.0.113.1", "ip get x",
		"node list", "node get node-a", "node get node-b", "node get x", "node forget node-a", "node forget node-a --force",
		"node forget node-b --dry-run", "node forget x",
		"ipam pools", "ipam list", "ipam check --settle 0s", "ipam release 0123", "ipam release x",
		"fqdn list", "fqdn explain api.example.com", "fqdn explain *",
		"fqdn learn api.example.com 192.0.2.7 2001:db8::7", "fqdn learn api.example.com 192.0.2.7 --dry-run", "fqdn learn x",
		"fqdn delete x --dry-run", "fqdn delete *", "fqdn delete",
		"explain --from 0123 --to 10.244.0.3 --port 80",
		"explain --from 300 --to 10.244.0.3 --port 80 --source-port 4000", "explain --from 0123 --to 192.0.2.1 --icmp echo",
		"explain --from 0123 --to 10.96.0.10 --port 80",
		"explain --from shop/web-0 --to 10.244.0.2 --port 53/udp --at 2001-09-09T01:46:40Z",
		"hubble history delete --namespace shop", "hubble history delete",
		"observe", "observe --label app", "observe --label =", "observe --verdict lost",
		"conntrack list", "conntrack list --limit 1",
		"conntrack list --state x", "conntrack flush", "conntrack flush --port 53", "conntrack flush --all --dry-run",
		"map list", "map dump sl_peer",
		"map dump sl_peer --limit 1", "map dump x", "check", "check --repair", "audit",
		"migrate from-cilium -f " + cilium, "migrate from-cilium",
		"policy validate -f " + file, "policy apply", "policy apply -f " + file + " --expect-revision 6",
		"policy apply -f " + file + " --wait=false", "policy apply -f " + bad, "policy apply -f " + broken,
		"policy apply -f " + dir,
		"policy apply -f " + file + " --prune", "policy list", "policy list --refused", "policy list --kind x",
		"policy get netpol shop/web", "policy get netpol x",
		"policy explain --from 0123 --to 301 --port 80", "policy explain --from 0123",
		"policy explain --from reserved:x --to 301 --port 80", "policy table 300", "policy table x",
		"policy diff -f " + file, "policy diff --delete netpol/shop/web", "policy diff", "policy diff -f " + bad,
		"policy confirm", "policy delete netpol shop/web shop/none", "policy delete netpol",
		"service list", "service diff -f " + web, "service apply", "service apply -f " + web + " --dry-run",
		"service apply -f " + web, "service apply -f " + web + " --wait=false", "service apply -f " + wrong,
		"service apply -f " + web + " --expect-revision 5",
		"service diff -f " + web, "service diff -f " + wrong, "service list",
		"service list --address 10.96.0.9", "service list --address x", "service get shop/web", "service get web",
		"backend list", "backend list --service shop/web", "backend list --service web",
		"shares", "shares acme", "controller status",
		"store status", "store token create", "store token create --valid-for 25h", "store revoke node-b",
		"store revoke node-b --dry-run", "store revoke node-z", "store member remove node-c", "store member remove node-z",
		"store member remove node-c --dry-run", "store snapshot save " + dir + "/snapshot", "store snapshot save " + dir,
		"store join", "store join --dry-run", "store rebuild", "store revoke",
		"service delete shop/web web", "service delete", "service delete -f " + web,
		"bugreport --log-lines 0", "bugreport -w " + dir, "bugreport -w " + file + "/x",
		"prepare", "dev up", "nonsense", "endpoint nonsense", "--timeout 0s status", "-o yaml status", "--nonsense",
		"endpoint", "policy apply x",
	} {
		for _, format := range []string{"table", "json"} {
			code, out, errOut := n.Sluice(append([]string{"-o", format}, strings.Fields(line)...)...)
			for len(n.Observed) > 0 {
				<-n.Observed
			}
			if format == "json" {
				addKeys(t, keys, line, out)
			}
			fmt.Fprintf(&got, "==== sluice -o %s %s: exit code %d\n%s", format, line, code, out)
			if errOut != "" {
				fmt.Fprintf(&got, "---- standard error\n%s", errOut)
			}
		}
	}
	text := strings.NewReplacer(dir, "DIR", filepath.Dir(web), "DIR", n.RunDir, "RUN",
		filepath.Dir(mustExecutable(t)), "SELF").Replace(got.String())
	compareWithFile(t, "outputs.txt", passing.ReplaceAllString(text, "TIME"))
	compareWithFile(t, "../../../docs/reference/json.md", keyPage(keys))
}

// addKeys adds the paths of the JSON keys in the output of a command line to the paths of its command.
func addKeys(t *testing.T, keys map[string]map[string]bool, line, out string) {
	t.Helper()
	name := commandOf(line)
	if name == "" {
		return
	}
	for decoder := json.NewDecoder(strings.NewReader(out)); ; {
		var v any
		switch err := decoder.Decode(&v); {
		case errors.Is(err, io.EOF):
			return
		case err != nil:
			t.Errorf("sluice -o json %s: %v", line, err)
			return
		}
		if keys[name] == nil {
			keys[name] = map[string]bool{}
		}
		addPaths(keys[name], "", v)
	}
}

// commandOf returns the command of a line without arguments and flags. It returns an empty string for a group of
// commands, which prints help, and for a former name.
func commandOf(line string) string {
	cmd, _, err := (&invocation.Invocation{}).Root(commands...).Find(strings.Fields(line))
	if err != nil || cmd.HasSubCommands() || cmd.Hidden {
		return ""
	}
	return strings.TrimPrefix(cmd.CommandPath(), "sluice ")
}

// addPaths adds the paths of an object's keys: "items[].address".
func addPaths(paths map[string]bool, path string, v any) {
	switch v := v.(type) {
	case map[string]any:
		for key, value := range v {
			below := strings.TrimPrefix(path+"."+key, ".")
			paths[below] = true
			addPaths(paths, below, value)
		}
	case []any:
		for _, element := range v {
			addPaths(paths, path+"[]", element)
		}
	}
}

// keyPage is docs/reference/json.md.
func keyPage(keys map[string]map[string]bool) string {
	var page strings.Builder
	page.WriteString(`# Keys of JSON

The keys that the commands of ` + "`sluice`" + ` print with ` + "`-o json`" + `.
[reference.md](../reference.md#json) has the rules. A test writes this page from
[outputs.txt](../../cmd/sluice/testdata/outputs.txt): a key whose value the test node does not have is missing here.
` + "`[]`" + ` is an element of a list.
`)
	for name, paths := range output.Ordered(keys) {
		fmt.Fprintf(&page, "\n## %s\n\n```text\n", name)
		for path := range output.Ordered(paths) {
			page.WriteString(path + "\n")
		}
		page.WriteString("```\n")
	}
	return page.String()
}
