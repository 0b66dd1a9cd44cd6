// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// dnsNames is the number of names of the servers' zone.
const dnsNames = 1000

// namesPolicies allow the clients to query the servers: "direct" by a plain rule, "proxied" by a rule for names.
const namesPolicies = `
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: bench-dns-direct}
spec:
  endpointSelector: {matchLabels: {role: direct}}
  egress:
  - toEndpoints: [{matchLabels: {role: dns}}]
    toPorts: [{ports: [{protocol: ANY, port: "53"}]}]
---
apiVersion: cilium.io/v2
kind: CiliumNetworkPolicy
metadata: {name: bench-dns-proxied}
spec:
  endpointSelector: {matchLabels: {role: proxied}}
  egress:
  - toEndpoints: [{matchLabels: {role: dns}}]
    toPorts:
    - ports: [{protocol: ANY, port: "53"}]
      rules: {dns: [{matchPattern: "*.bench.example"}]}
  - toFQDNs: [{matchPattern: "*.bench.example"}]
`

// dnsClient is a pod that queries servers, with its results for one server.
type dnsClient struct {
	name string
	pod  pod.Pod
	// of all rounds
	lookups  samples
	rates    []float64
	tcpRates []float64
	busy     time.Duration // CPU of sluice-dns
	queries  float64
	lost     int
}

// dns compares lookups through sluice-dns with direct ones, of the same servers by pods of the same node.
func (b *bench) dns(ctx context.Context) (err error) {
	var end undo
	defer func() { err = errors.Join(err, end.all()) }()
	pods := make(map[string]pod.Pod)
	for _, role := range []string{"dns", "direct", "proxied"} {
		n, err := b.labelled("sluice", "role", role)
		if err != nil {
			return err
		}
		p, err := n.connect(ctx, b.prefix+"-dns-"+role)
		if err != nil {
			return err
		}
		end.add(func() error { return n.disconnect(context.WithoutCancel(ctx), p) })
		pods[role] = p
	}
	if _, err := b.policies.upsert(ctx, namesPolicies); err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", b.prefix)
	if err != nil {
		return err
	}
	end.add(func() error { return os.RemoveAll(dir) })
	var queries strings.Builder
	for i := range dnsNames {
		fmt.Fprintf(&queries, "n%d.bench.example A\n", i)
	}
	if err := os.WriteFile(filepath.Join(dir, "queries"), []byte(queries.String()), 0o600); err != nil {
		return err
	}
	at := netip.AddrPortFrom(pods["dns"].IPv4, 53)
	fmt.Fprintln(b.out, "Lookups of known names by pods of one node, through sluice-dns, compared with direct ones. "+
		"Latency: one query at a time. Queries per second: dnsperf, 8 clients for 2 s.")
	fmt.Fprintln(b.out)
	fmt.Fprintln(b.out, "| server | direct p50 | p99 | proxied p50 | p99 | ratio of p50 | direct queries/s | proxied | "+
		"ratio | TCP, ratio | CPU of sluice-dns for each query | lost |")
	fmt.Fprintln(b.out, "|---|---|---|---|---|---|---|---|---|---|---|---|")
	for _, server := range []string{"unbound", "named", "dnsmasq"} {
		if err := b.dnsServer(ctx, server, dir, pods, at); err != nil {
			return fmt.Errorf("%s: %w", server, err)
		}
	}
	return b.newAddresses(ctx, pods, at)
}

// dnsServer measures one server.
func (b *bench) dnsServer(
	ctx context.Context, name, dir string, pods map[string]pod.Pod, at netip.AddrPort,
) (err error) {
	stop, err := startDNS(ctx, name, dir, pods["dns"], at.Addr())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	direct, proxied := &dnsClient{name: "direct", pod: pods["direct"]}, &dnsClient{name: "proxied", pod: pods["proxied"]}
	for _, c := range []*dnsClient{direct, proxied} {
		if err := c.known(ctx, at); err != nil {
			return err
		}
	}
	var ratios, rates, tcp []float64
	for round := range b.sizes.rounds {
		pair := []*dnsClient{direct, proxied}
		if round%2 == 1 {
			pair[0], pair[1] = pair[1], pair[0]
		}
		p50 := make(map[*dnsClient]time.Duration)
		for _, c := range pair {
			took, err := c.ask(at, b.sizes.exchanges/20)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			c.lookups = append(c.lookups, took...)
			p50[c] = took.quantile(0.5)
			before, err := serviceCPU(b.node, devnode.DNS)
			if err != nil {
				return err
			}
			rate, done, lost, err := c.dnsperf(ctx, dir, at, "udp")
			if err != nil {
				return err
			}
			after, err := serviceCPU(b.node, devnode.DNS)
			if err != nil {
				return err
			}
			c.rates, c.busy, c.queries, c.lost = append(c.rates, rate), c.busy+after-before, c.queries+done, c.lost+lost
			if name == "dnsmasq" { // it starts a process for each TCP connection
				continue
			}
			if rate, _, lost, err = c.dnsperf(ctx, dir, at, "tcp"); err != nil {
				return err
			}
			c.tcpRates, c.lost = append(c.tcpRates, rate), c.lost+lost
		}
		last := len(direct.rates) - 1
		ratios = append(ratios, ratio(p50[proxied], p50[direct]))
		rates = append(rates, proxied.rates[last]/direct.rates[last])
		if len(direct.tcpRates) > 0 {
			tcp = append(tcp, proxied.tcpRates[last]/direct.tcpRates[last])
		}
	}
	each := time.Duration(float64(proxied.busy) / max(proxied.queries, 1))
	fmt.Fprintf(b.out, "| %s | %s | %s | %s | %s | %.2f | %.0f | %.0f | %.2f | %.2f | %s | %d |\n", name,
		microseconds(direct.lookups.quantile(0.5)), microseconds(direct.lookups.quantile(0.99)),
		microseconds(proxied.lookups.quantile(0.5)), microseconds(proxied.lookups.quantile(0.99)), median(ratios),
		median(direct.rates), median(proxied.rates), median(rates), median(tcp), microseconds(each), direct.lost+proxied.lost)
	b.wantRatio("DNS by "+name+", known name: p50 through sluice-dns to direct", 1.5, median(ratios))
	b.wantTime("DNS by "+name+", known name: CPU of sluice-dns for a query", 15*time.Microsecond, each)
	return nil
}

// known asks for each name until sluice-dns evaluates queries and enforces the addresses.
func (c *dnsClient) known(ctx context.Context, at netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		_, err := c.askFor(at, dnsNames, func(i int) string { return fmt.Sprintf("n%d.bench.example.", i) })
		if err == nil || ctx.Err() != nil {
			return err
		}
		time.Sleep(100 * time.Millisecond) // the server starts
	}
}

// ask asks for one name so many times.
func (c *dnsClient) ask(at netip.AddrPort, times int) (samples, error) {
	return c.askFor(at, times, func(int) string { return "n7.bench.example." })
}

func (c *dnsClient) askFor(at netip.AddrPort, times int, name func(i int) string) (took samples, err error) {
	socket, err := c.pod.DialUDP(at)
	if err != nil {
		return nil, err
	}
	defer socket.Close()
	buf := make([]byte, 2048)
	for i := range times {
		m := dnsmessage.Message{
			Header: dnsmessage.Header{ID: uint16(i), RecursionDesired: true}, //nolint:gosec // any number
			Questions: []dnsmessage.Question{{
				Name: dnsmessage.MustNewName(name(i)), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET,
			}},
		}
		query, err := m.Pack()
		if err != nil {
			return nil, err
		}
		one, err := timed(func() error {
			_ = socket.SetDeadline(time.Now().Add(5 * time.Second))
			if _, err := socket.Write(query); err != nil {
				return err
			}
			size, err := socket.Read(buf)
			if err == nil && (size < 12 || buf[0] != query[0] || buf[1] != query[1] || buf[3]&15 != 0) {
				err = fmt.Errorf("%s: answer % x", name(i), buf[:size])
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		took = append(took, one)
	}
	return took, nil
}

// dnsperf returns queries per second, and the numbers of completed and lost queries. With its default of 5 s, a few
// lost queries would decide about the rate.
func (c *dnsClient) dnsperf(ctx context.Context, dir string, at netip.AddrPort, mode string) (
	rate, done float64, lost int, err error,
) {
	out, err := exec.CommandContext(ctx, "nsenter", "--net="+c.pod.Netns, "dnsperf", "-s", at.Addr().String(),
		"-p", strconv.Itoa(int(at.Port())), "-d", filepath.Join(dir, "queries"), "-c", "8", "-q", "8", "-t", "0.2",
		"-l", "2", "-m", mode).CombinedOutput()
	if err != nil {
		return 0, 0, 0, fmt.Errorf("dnsperf: %w: %s", err, out)
	}
	value := func(key string) (v float64) {
		_, rest, _ := strings.Cut(string(out), key)
		_, _ = fmt.Sscan(rest, &v)
		return v
	}
	return value("Queries per second:"), value("Queries completed:"), int(value("Queries lost:")), nil
}

// startDNS starts a server in a pod, and returns a function that ends it.
func startDNS(ctx context.Context, name, dir string, in pod.Pod, at netip.Addr) (stop func() error, err error) {
	var records bytes.Buffer
	each := func(format string) {
		for i := range dnsNames {
			a := netip.AddrFrom4([4]byte{198, 51, 100 + byte(i>>8), byte(i)})
			fmt.Fprintf(&records, format, fmt.Sprintf("n%d.bench.example.", i), a)
		}
	}
	config, zone := filepath.Join(dir, name+".conf"), filepath.Join(dir, name+".zone")
	var args []string
	switch name {
	case "unbound":
		each("local-data: \"%s A %s\"\n")
		text := fmt.Sprintf("server:\n do-daemonize: no\n username: \"\"\n chroot: \"\"\n directory: %q\n use-syslog: no\n"+
			" pidfile: \"\"\n interface: %s\n access-control: 0.0.0.0/0 allow\n num-threads: 1\n"+
			" local-zone: \"bench.example.\" static\n%sremote-control:\n control-enable: no\n", dir, at, records.String())
		if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
			return nil, err
		}
		args = []string{"unbound", "-d", "-c", config}
	case "named":
		records.WriteString("$TTL 300\n@ SOA ns hostmaster 1 300 300 300 300\n@ NS ns\nns A 192.0.2.1\n")
		each("%s A %s\n")
		text := fmt.Sprintf("options { directory %q; listen-on { %s; }; listen-on-v6 { none; }; recursion no; pid-file none;"+
			" session-keyfile none; lock-file none; };\ncontrols {};\nzone \"bench.example\" { type primary; file %q; };\n",
			dir, at, zone)
		if err := errors.Join(
			os.WriteFile(config, []byte(text), 0o600), os.WriteFile(zone, records.Bytes(), 0o600),
		); err != nil {
			return nil, err
		}
		args = []string{"named", "-g", "-n", "1", "-c", config}
	case "dnsmasq":
		for i := range dnsNames {
			fmt.Fprintf(&records, "198.51.%d.%d n%d.bench.example\n", 100+i>>8, i&255, i)
		}
		if err := os.WriteFile(zone, records.Bytes(), 0o644); err != nil {
			return nil, err
		}
		args = []string{
			"dnsmasq", "-k", "-C", "/dev/null", "-u", "root", "--no-resolv", "--no-hosts", "--addn-hosts=" + zone,
			"--listen-address=" + at.String(), "--bind-interfaces", "--pid-file=", "--local=/bench.example/",
			"--local-ttl=300", "--dns-forward-max=10000",
		}
	}
	var output bytes.Buffer
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + in.Netns}, args...)...)
	cmd.Stdout, cmd.Stderr = &output, &output
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	return func() error {
		_ = cmd.Process.Kill()
		if err := cmd.Wait(); cmd.ProcessState == nil || cmd.ProcessState.Exited() {
			return fmt.Errorf("%s has ended early: %w: %s", name, err, output.String())
		}
		return nil
	}, nil
}

// newAddresses measures lookups whose answers have an address that no answer had before.
func (b *bench) newAddresses(ctx context.Context, pods map[string]pod.Pod, at netip.AddrPort) error {
	socket, err := pods["dns"].ListenPacket(at)
	if err != nil {
		return err
	}
	var serving sync.WaitGroup
	defer serving.Wait()
	defer socket.Close()
	serving.Go(func() { answerAnew(socket) })
	direct, proxied := &dnsClient{pod: pods["direct"]}, &dnsClient{pod: pods["proxied"]}
	var added samples
	for round := range b.sizes.rounds {
		p50 := make(map[*dnsClient]time.Duration)
		for _, c := range []*dnsClient{direct, proxied} {
			took, err := c.askFor(at, b.sizes.exchanges/100, func(i int) string {
				return fmt.Sprintf("new%d-%d.bench.example.", round, i%10)
			})
			if err != nil {
				return err
			}
			c.lookups = append(c.lookups, took...)
			p50[c] = took.quantile(0.5)
		}
		added = append(added, p50[proxied]-p50[direct])
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	fmt.Fprintf(b.out, "\nAnswers with a new address: direct p50 %s, p99 %s; through sluice-dns p50 %s, p99 %s; "+
		"added p50 %s.\n",
		microseconds(direct.lookups.quantile(0.5)), microseconds(direct.lookups.quantile(0.99)),
		microseconds(proxied.lookups.quantile(0.5)), microseconds(proxied.lookups.quantile(0.99)),
		microseconds(added.quantile(0.5)))
	b.wantTime("DNS, new address: added p50", 400*time.Microsecond, added.quantile(0.5))
	b.wantTime("DNS, new address: p99", 3*time.Millisecond, proxied.lookups.quantile(0.99))
	return nil
}

// answerAnew answers each query with another address, until the socket is closed.
func answerAnew(socket *net.UDPConn) {
	buf := make([]byte, 2048)
	for number := uint32(0); ; number++ {
		size, client, err := socket.ReadFromUDPAddrPort(buf)
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if m.Unpack(buf[:size]) != nil || len(m.Questions) != 1 {
			continue
		}
		m.Response = true
		m.Answers = []dnsmessage.Resource{{
			Header: dnsmessage.ResourceHeader{Name: m.Questions[0].Name, Class: m.Questions[0].Class, TTL: 60},
			Body:   &dnsmessage.AResource{A: [4]byte{198, 18 + byte(number>>16), byte(number >> 8), byte(number)}},
		}}
		if b, err := m.Pack(); err == nil {
			_, _ = socket.WriteToUDPAddrPort(b, client)
		}
	}
}
