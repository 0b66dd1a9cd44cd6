// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func TestObserveShowsVerdictsWithTheirRules(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Flows = []*datapathv1.Flow{{
		Type: datapathv1.FlowType_FLOW_TYPE_DROP, Time: timestamppb.New(time.Unix(1e9, 0)),
		Verdict: datapathv1.Verdict_VERDICT_DROPPED, Reason: datapathv1.Reason_REASON_POLICY_DENIED,
		Direction: netv1.Direction_DIRECTION_INGRESS, Protocol: 6, TcpFlags: 2, Length: 74,
		Source: &datapathv1.FlowEnd{
			Address: "10.244.0.2", Port: 4000, Identity: 300, Labels: []*workloadv1.Label{nodetest.Label("app", "client")},
		},
		Destination: &datapathv1.FlowEnd{Address: "10.244.0.3", Port: 80, Identity: 301},
		Egress: &datapathv1.SideVerdict{
			Verdict: datapathv1.Verdict_VERDICT_FORWARDED, Table: verdict.TableAllow,
			DecidedBy: netv1.DecidedBy_DECIDED_BY_NO_POLICY,
		},
		Ingress: &datapathv1.SideVerdict{
			Verdict: datapathv1.Verdict_VERDICT_DROPPED, Table: 17, Rule: 2, Revision: 6,
			DecidedBy: netv1.DecidedBy_DECIDED_BY_RULE, RuleSources: []string{"NetworkPolicy shop/db spec"},
		},
	}}
	out, _ := n.Want(t, 0, "observe", "--label", "app=web,tier in (a,b)", "--label", "!x", "--verdict", "dropped,audited",
		"--type", "policy-verdict", "-o", "wide")
	r := <-n.Observed
	if len(r.GetSelectors()) != 2 || len(r.GetSelectors()[0].GetRequirements()) != 2 ||
		r.GetSelectors()[1].GetRequirements()[0].GetOperator() != datapathv1.LabelOperator_LABEL_OPERATOR_NOT_EXISTS ||
		len(r.GetVerdicts()) != 2 || r.GetVerdicts()[1] != datapathv1.Verdict_VERDICT_AUDITED ||
		r.GetTypes()[0] != datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT {
		t.Errorf("request %v", r)
	}
	for _, want := range []string{
		"10.244.0.2:4000 (app=client) -> 10.244.0.3:80 (identity 301)  tcp SYN, 74 bytes; ingress dropped by " +
			"NetworkPolicy shop/db spec",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	folded, _ := n.Want(t, 0, "observe")
	<-n.Observed
	for line := range strings.Lines(folded) {
		if len(line) > output.Width+1 {
			t.Errorf("without -o wide, a line is longer than %d columns: %s", output.Width, line)
		}
	}
	if strings.Join(strings.Fields(folded), " ") != strings.Join(strings.Fields(out), " ") {
		t.Errorf("the words of both forms differ:\n%s\n%s", folded, out)
	}
	out, _ = n.Want(t, 0, "observe", "-o", "json")
	<-n.Observed
	var e Event
	if err := json.NewDecoder(strings.NewReader(out)).Decode(&e); err != nil || !strings.Contains(out, `"type":"drop"`) ||
		e.GetFlow().GetIngress().GetRuleSources()[0] != "NetworkPolicy shop/db spec" ||
		!strings.Contains(out, `"tcpFlags":["syn"]`) {
		t.Errorf("JSON %v %s", err, out)
	}
	_, errOut := n.Want(t, invocation.ExitUsage, "observe", "--label", "app in (")
	nodetest.WantLines(t, errOut, "sluice: --label: at its end: want a comma or )")
	if len(n.Observed) > 0 {
		t.Error("a selector with a mistake was sent")
	}
	// The service's error names the field, and the command's error names the flag.
	_, errOut = n.Want(t, invocation.ExitUsage, "observe", "--port", "1", "--label", "app")
	<-n.Observed
	nodetest.WantLines(t, errOut, "sluice: --port: this node does not have it",
		"--label: must be shorter")
	for _, bad := range [][]string{
		{"--label", " "}, {"--verdict", "lost"}, {"--type", "unspecified"}, {"--reason", "nonsense"},
	} {
		_, errOut := n.Want(t, invocation.ExitUsage, append([]string{"observe"}, bad...)...)
		if bad[0] != "--label" && !strings.Contains(errOut, "is not one of ") {
			t.Errorf("%q: %s", bad, errOut)
		}
	}
}

func TestObserveSendsItsCriteria(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "observe", "--since", "1m", "--reason", "spoofed-ip", "--container", "c1", "--container",
		"c2/net1", "--identity", "300", "--pod", "shop/web-0,db",
		"--address", "10.0.0.7/8", "--address", "fd00::1", "--direction", "egress", "--protocol", "udp,47", "--port", "53")
	r := <-n.Observed
	if r.GetFollow() || r.GetSince() == nil || len(r.GetOwners()) != 2 || r.GetOwners()[0].GetInterfaceName() != "eth0" ||
		r.GetOwners()[1].GetInterfaceName() != "net1" ||
		r.GetPods()[0].GetNamespace() != "shop" || r.GetPods()[1].GetNamespace() != "default" ||
		r.GetPods()[1].GetName() != "db" ||
		r.GetPrefixes()[0] != "10.0.0.0/8" || r.GetPrefixes()[1] != "fd00::1/128" ||
		r.GetDirection() != netv1.Direction_DIRECTION_EGRESS ||
		r.GetProtocols()[0] != 17 || r.GetProtocols()[1] != 47 || r.GetPorts()[0] != 53 || r.GetIdentities()[0] != 300 ||
		r.GetReasons()[0] != datapathv1.Reason_REASON_SPOOFED_IP {
		t.Errorf("request %v", r)
	}
	_, errOut := n.Want(t, 0, "observe", "--container", "0123")
	if r := <-n.Observed; r.GetOwners()[0].GetContainerId() != nodetest.LongID || errOut != "" {
		t.Errorf("the start of an ID was sent as %v, %s", r.GetOwners(), errOut)
	}
	// The name of a missing container is accepted with a note: the container may have been removed, or be created later.
	_, errOut = n.Want(t, 0, "observe", "--container", "nope", "--to", "shop/gone")
	if r := <-n.Observed; r.GetOwners()[0].GetContainerId() != "nope" ||
		r.GetDestination().GetPods()[0].GetName() != "gone" ||
		!strings.Contains(errOut, "sluice: note: --container nope: no container of this node has this name now") ||
		!strings.Contains(errOut, "sluice: note: --to shop/gone: no container or pod of this node has this name now") {
		t.Errorf("request %v, standard error %s", r, errOut)
	}
	for _, want := range []string{
		"spoofed-ip", "198.51.100.7:1234 (identity 300) -> 10.244.0.2:53",
		"12 events were lost by the kernel",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	out, _ = n.Want(t, 0, "observe", "-o", "json")
	<-n.Observed
	d := json.NewDecoder(strings.NewReader(out))
	var e, lost Event
	if err := d.Decode(&e); err != nil {
		t.Fatal(err)
	}
	if err := d.Decode(&lost); err != nil {
		t.Fatal(err)
	}
	f := e.GetFlow()
	if f.GetProtocol() != netv1.Protocol_PROTOCOL_UDP || f.GetDestination().GetPort() != 53 ||
		f.GetSource().GetPod().GetName() != "web-0" || f.GetNodeName() != "node-1" || f.GetUuid() == "" ||
		f.GetSource().GetOwner() == nil || f.GetDestination().GetOwner() != nil || lost.GetLost().GetCount() != 12 {
		t.Errorf("flows %+v, %+v", f, lost)
	}
	for _, bad := range [][]string{
		{"--direction", "up"},
		{"--address", "x"},
		{"--protocol", "300"},
		{"--port", "70000"},
		{"--identity", "0"},
		{"--since", "-1s"},
		{"--since", "yesterday"},
		{"--until", "25:00"},
		{"--since", "1m", "--until", "2m"},
		{"--last", "4097"},
		{"--not"},
		{"--port", "80", "--not"},
		{"--from", ""},
		{"--from", "10.0.0.1:80"},
		{"--to", "a/b/c"},
		{"--to", "app in ("},
		{"--from-port", "70000"},
		{"--to-port", "x"},
		{"--to", "99999999"},
		{"--pod", "a/b/c"},
		{"--output-file", "x", "--max-size", "1K"},
		{"--output-file", "x", "--max-files", "0"},
	} {
		n.Want(t, invocation.ExitUsage, append([]string{"observe"}, bad...)...)
	}
}

func TestObserveShowsTheServiceThatWasAsked(t *testing.T) {
	for name, c := range map[string]struct {
		flow *datapathv1.Flow
		line string
		json []string
	}{
		"a service that is known": {
			&datapathv1.Flow{
				OriginalDestinationAddress: "10.96.0.10", OriginalDestinationPort: 53, Service: "shop/dns:udp",
				Destination: &datapathv1.FlowEnd{Address: "10.244.0.3", Port: 5353, Identity: 301},
			},
			"10.244.0.2:4000 (identity 300) -> 10.96.0.10:53 (service shop/dns:udp) -> 10.244.0.3:5353 (identity 301)  udp",
			[]string{
				`"originalDestinationAddress":"10.96.0.10"`, `"originalDestinationPort":53`, `"service":"shop/dns:udp"`,
				`"destination":{"address":"10.244.0.3"`,
			},
		},
		"one port without a name": {
			&datapathv1.Flow{
				OriginalDestinationAddress: "fd00:96::1", OriginalDestinationPort: 53, Service: "shop/dns",
				Destination: &datapathv1.FlowEnd{Address: "fd00:244::3", Port: 5353},
			},
			"-> [fd00:96::1]:53 (service shop/dns) -> [fd00:244::3]:5353  udp", nil,
		},
		"a service that is gone": {
			&datapathv1.Flow{
				OriginalDestinationAddress: "10.96.0.10", OriginalDestinationPort: 53,
				Destination: &datapathv1.FlowEnd{Address: "10.244.0.3", Port: 5353},
			},
			"-> 10.96.0.10:53 (service) -> 10.244.0.3:5353  udp", nil,
		},
		"no backend": {
			&datapathv1.Flow{
				OriginalDestinationAddress: "10.96.0.10", OriginalDestinationPort: 53, Service: "shop/dns",
				Destination: &datapathv1.FlowEnd{Address: "10.96.0.10", Port: 53},
			},
			"10.244.0.2:4000 (identity 300) -> 10.96.0.10:53 (service shop/dns)  udp", nil,
		},
		"no service": {
			&datapathv1.Flow{Destination: &datapathv1.FlowEnd{Address: "10.244.0.3", Port: 5353}},
			"10.244.0.2:4000 (identity 300) -> 10.244.0.3:5353  udp", nil,
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := nodetest.New(t, Command)
			c.flow.Source = &datapathv1.FlowEnd{Address: "10.244.0.2", Port: 4000, Identity: 300}
			c.flow.Protocol = 17
			n.Flows = []*datapathv1.Flow{c.flow}
			out, _ := n.Want(t, 0, "observe", "-o", "wide")
			<-n.Observed
			if !strings.Contains(out, c.line) {
				t.Errorf("no %q in\n%s", c.line, out)
			}
			out, _ = n.Want(t, 0, "observe", "-o", "json")
			<-n.Observed
			first, _, _ := strings.Cut(out, "\n")
			for _, want := range c.json {
				if !strings.Contains(first, want) {
					t.Errorf("no %s in %s", want, first)
				}
			}
			if c.json == nil && c.flow.GetService() == "" && !strings.Contains(first, `"service":""`) {
				t.Errorf("a service in %s", first)
			}
		})
	}
}

func TestObserveAsksForServices(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Want(t, 0, "observe", "--service", "shop/web,dns")
	r := <-n.Observed
	if s := r.GetServices(); len(s) != 2 || s[0].GetNamespace() != "shop" || s[0].GetName() != "web" ||
		s[1].GetNamespace() != "default" || s[1].GetName() != "dns" {
		t.Errorf("request %v", r)
	}
	for _, bad := range []string{"/web", "shop/", "a/b/c"} {
		_, errOut := n.Want(t, invocation.ExitUsage, "observe", "--service", bad)
		if !strings.Contains(errOut, "--service: ") {
			t.Errorf("%q: %s", bad, errOut)
		}
	}
	if len(n.Observed) > 0 {
		t.Error("a service without a name was sent")
	}
}

func TestObserveSendsTheCriteriaOfEachEnd(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Want(t, 0, "observe", "--from", "0123", "--from", "app=web,tier in (a,b)", "--from", "10.0.0.7/8", "--from", "300",
		"--from-port", "80,81", "--to", "fd00::1", "--to", "reserved:host", "--to", "k8s:app", "--to", "!x", "--to-port",
		"53",
		"--until", "2099-01-01T00:00:00Z", "--last", "7")
	r := <-n.Observed
	from, to := r.GetSource(), r.GetDestination()
	if from.GetOwners()[0].GetContainerId() != nodetest.LongID || len(from.GetSelectors()[0].GetRequirements()) != 2 ||
		from.GetPrefixes()[0] != "10.0.0.0/8" || from.GetIdentities()[0] != 300 || len(from.GetPorts()) != 2 {
		t.Errorf("source %v", from)
	}
	if to.GetPrefixes()[0] != "fd00::1/128" || len(to.GetSelectors()) != 3 || len(to.GetOwners()) != 0 ||
		to.GetSelectors()[0].GetRequirements()[0].GetSource() != "reserved" || to.GetPorts()[0] != 53 {
		t.Errorf("destination %v", to)
	}
	if r.GetLast() != 7 || r.GetUntil().AsTime().Year() != 2099 || len(r.GetExcluded()) != 0 {
		t.Errorf("request %v", r)
	}
}

// TestNotIsOfTheNextCriterionAlone: --not inverts only the next filter.
func TestNotIsOfTheNextCriterionAlone(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Want(t, 0, "observe", "--not", "--port", "53,80", "--verdict", "dropped", "--not", "--from", "10.0.0.0/8", "--not",
		"--direction=egress", "--port", "443")
	r := <-n.Observed
	x := r.GetExcluded()
	if len(x) != 3 || len(x[0].GetPorts()) != 2 || x[0].GetSource() != nil ||
		x[1].GetSource().GetPrefixes()[0] != "10.0.0.0/8" ||
		x[1].GetPorts() != nil || x[2].GetDirection() != netv1.Direction_DIRECTION_EGRESS {
		t.Errorf("excluded %v", x)
	}
	if len(r.GetPorts()) != 1 || r.GetPorts()[0] != 443 || len(r.GetVerdicts()) != 1 || r.GetSource() != nil ||
		r.GetDirection() != 0 {
		t.Errorf("request %v", r)
	}
}

func TestTimesAreOfThisMachine(t *testing.T) {
	zone := time.FixedZone("x", 2*3600)
	now := time.Date(2026, 11, 28, 0, 10, 0, 0, zone)
	for text, want := range map[string]time.Time{
		"1m":                        now.Add(-time.Minute),
		"0s":                        now,
		"2026-11-27T10:00:00Z":      time.Date(2026, 11, 27, 12, 0, 0, 0, zone),
		"2026-11-27T10:00:00+02:00": time.Date(2026, 11, 27, 10, 0, 0, 0, zone),
		"2026-11-27 10:00:00.250":   time.Date(2026, 11, 27, 10, 0, 0, 250e6, zone),
		"2026-11-27":                time.Date(2026, 11, 27, 0, 0, 0, 0, zone),
		"00:05:01.5":                time.Date(2026, 11, 28, 0, 5, 1, 5e8, zone),
		"00:05":                     time.Date(2026, 11, 28, 0, 5, 0, 0, zone),
	} {
		if got, err := timeOf("--since", text, now); err != nil || !got.Equal(want) {
			t.Errorf("%s: %v, %v, want %v", text, got, err, want)
		}
	}
}

func TestLinesHaveADateWhereTheDayDiffers(t *testing.T) {
	at := time.Date(2026, 11, 27, 23, 59, 59, 0, time.Local)
	f := Event{ObserveResponse: &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Flow{Flow: &datapathv1.Flow{
		Time: timestamppb.New(at), Verdict: datapathv1.Verdict_VERDICT_DROPPED, Protocol: netv1.Protocol_PROTOCOL_UDP,
	}}}}
	if got := f.Line(at); !strings.HasPrefix(got, "23:59:59.000  dropped") {
		t.Errorf("on the day: %s", got)
	}
	if got := f.Line(at.Add(time.Minute)); !strings.HasPrefix(got, "2026-11-27 23:59:59.000  dropped") {
		t.Errorf("on the next day: %s", got)
	}
}

func TestARepairIsShownAsOne(t *testing.T) {
	e := Event{ObserveResponse: &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Repair{Repair: &datapathv1.AttachmentRepair{
		Time: timestamppb.New(time.Unix(1e9, 0)), Owner: &workloadv1.Owner{ContainerId: "c1", InterfaceName: "eth0"},
		Uuid: "u", Difference: &datapathv1.Difference{
			Subject: "filter", Key: "sl1\x1b", Want: "sluice_from_pod", Have: "nothing",
		}, Error: "no capacity",
	}}}}
	got := e.Line(time.Unix(1e9, 0))
	if e.uuid() != "u" || !strings.Contains(got,
		`repaired  c1/eth0  program of sl1\x1b: want sluice_from_pod, have nothing; not repaired: no capacity`) {
		t.Errorf("%+v: %s", e, got)
	}
}

func TestDNSMessagesAreShown(t *testing.T) {
	end := func(address string, port uint32) *datapathv1.FlowEnd {
		return &datapathv1.FlowEnd{Address: address, Port: port, Identity: 300}
	}
	query := &datapathv1.Flow{
		Time: timestamppb.New(time.Unix(1e9, 0)), Type: datapathv1.FlowType_FLOW_TYPE_DNS, Uuid: "u",
		Verdict: datapathv1.Verdict_VERDICT_FORWARDED, Direction: netv1.Direction_DIRECTION_EGRESS, Protocol: 17,
		Source: end("10.244.0.2", 40000), Destination: end("10.244.0.9", 53),
		Dns: &datapathv1.DNSMessage{Name: "a.example.", QueryType: 65},
	}
	query.Source.Owner = &workloadv1.Owner{ContainerId: "c1", InterfaceName: "eth0"}
	line := func(change func(f *datapathv1.Flow)) string {
		f := proto.CloneOf(query)
		change(f)
		return Event{ObserveResponse: &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Flow{Flow: f}}}.
			Line(time.Unix(1e9, 0))
	}
	for want, change := range map[string]func(*datapathv1.Flow){
		"forwarded dns            egress  c1/eth0  10.244.0.2:40000 (identity 300) -> 10.244.0.9:53 (identity 300)  " +
			"udp by sluice-dns: query a.example. HTTPS": func(*datapathv1.Flow) {},
		"dropped   dns            egress  ": func(f *datapathv1.Flow) {
			f.Verdict, f.Dns.ResponseCode = datapathv1.Verdict_VERDICT_DROPPED, 5
		},
		"query a.example. HTTPS: NXDOMAIN": func(f *datapathv1.Flow) {
			f.Verdict, f.Dns.ResponseCode = datapathv1.Verdict_VERDICT_DROPPED, 3
		},
		"answer a.example. A: NOERROR, CNAME b.example., 192.0.2.1, 192.0.2.2, TTL 30": func(f *datapathv1.Flow) {
			f.Dns = &datapathv1.DNSMessage{
				Response: true, Name: "a.example.", QueryType: 1, Addresses: []string{"192.0.2.1", "192.0.2.2"},
				CnameTargets: []string{"b.example."}, TtlSeconds: 30,
			}
		},
		"answer a\\x1b. TYPE9999: RCODE23, to no query": func(f *datapathv1.Flow) {
			f.Verdict = datapathv1.Verdict_VERDICT_DROPPED
			f.Dns = &datapathv1.DNSMessage{Response: true, Name: "a\x1b.", QueryType: 9999, ResponseCode: 23}
		},
		"tcp by sluice-dns: query a.example. HTTPS": func(f *datapathv1.Flow) { f.Protocol = 6 },
		"query (redacted) A": func(f *datapathv1.Flow) {
			f.Dns = &datapathv1.DNSMessage{QueryType: 1, Redacted: true}
		},
	} {
		if got := line(change); !strings.Contains(got, want) {
			t.Errorf("got  %s\nwant %s", got, want)
		}
	}
	lost := Event{ObserveResponse: &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Lost{
		Lost: &datapathv1.LostEvents{Source: datapathv1.LossSource_LOSS_SOURCE_DNS, Count: 7},
	}}}
	if got := lost.Line(time.Now()); got != "--- 7 DNS messages were not reported by sluice-dns ---" {
		t.Errorf("printed %s", got)
	}
}
