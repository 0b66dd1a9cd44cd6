// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"net"
	"net/netip"
	"path/filepath"
	"strconv"
	"time"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/sandbox"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/flowmetrics"
	"github.com/sluice-net/sluice/services/hubble/internal/server/export"
	"github.com/sluice-net/sluice/services/hubble/internal/server/page"
)

// Config is the configuration of this service.
type Config struct {
	StateDir    string             `config:"stateDir" help:"directory of the files that survive a restart"`
	Datapath    string             `config:"datapath" help:"unix socket of the datapath"`
	Identity    string             `config:"identity" help:"unix socket of identity, which knows the other nodes"`
	NodeName    string             `config:"nodeName" help:"name of this node until a flow names it; empty: the host name"`
	Policy      string             `config:"policy" help:"unix socket of policy, which the page asks for manifests"`
	Listen      ListenConfig       `config:"listen"`
	Page        PageConfig         `config:"page"`
	History     HistoryConfig      `config:"history"`
	Shares      shares.LabelConfig `config:"shares"`
	FlowMetrics FlowMetricsConfig  `config:"flowMetrics"`
}

// ListenConfig serves the API over TCP with mutual TLS, in addition to the unix socket.
type ListenConfig struct {
	Address   string `config:"address" help:"host:port for clients with a certificate; empty: only the unix socket"`
	Cert      string `config:"cert" help:"file with the certificate, for the node's name"`
	Key       string `config:"key" help:"file with the key of the certificate"`
	ClientCA  string `config:"clientCA" help:"file with the CA certificates that verify clients"`
	Advertise string `config:"advertise" help:"host:port for peers; empty: the address, if it names a host"`
	// ServerName allows all nodes to share one certificate.
	ServerName string `config:"serverName" help:"name in the certificates of all nodes; empty: each node's name"`
}

// PageConfig serves the web page.
type PageConfig struct {
	Address string `config:"address" help:"loopback address and port of the web page; empty: no page"`
}

// HistoryConfig bounds the history.
type HistoryConfig struct {
	MaxSize config.ByteSize `config:"maxSize" help:"size of all files of flows, which tenants share; at least 4 MiB"`
	MaxAge  time.Duration   `config:"maxAge"  help:"age at which flows are removed; at most 168h"`
	Export  ExportConfig    `config:"export"`
}

// ExportConfig writes flows into files, as the static exporter of Hubble does.
type ExportConfig struct {
	File    string          `config:"file"    help:"file of exported flows, one JSON object a line; empty: no export"`
	Allow   string          `config:"allow"   help:"filters of Hubble's API as JSON objects; empty: all flows"`
	Deny    string          `config:"deny"    help:"filters of flows that are not exported, as JSON objects"`
	Fields  []string        `config:"fields"  help:"exported fields of a flow; empty: all"`
	MaxSize config.ByteSize `config:"maxSize" help:"size of the file at which it is renamed to FILE.1"`
	Backups int             `config:"backups" help:"renamed files that are kept, 1 to 100"`
}

func (e ExportConfig) selection() export.Selection {
	return export.Selection{Allow: e.Allow, Deny: e.Deny, Fields: e.Fields}
}

func (e ExportConfig) validate(p *config.Problems) {
	if e.File != "" && !filepath.IsAbs(e.File) {
		p.Addf("history.export.file", "%q is not an absolute path", e.File)
	}
	if err := e.selection().Validate(); err != nil {
		p.Addf("history.export", "%v", err)
	}
	if e.MaxSize < minExport {
		p.Addf("history.export.maxSize", "%s is less than %s", e.MaxSize, config.ByteSize(minExport))
	}
	if e.Backups < 1 || e.Backups > 100 {
		p.Addf("history.export.backups", "%d is not between 1 and 100", e.Backups)
	}
}

// minExport is the minimum size of a file of exported flows.
const minExport = 64 << 10

// FlowMetricsConfig selects the metrics of flows.
type FlowMetricsConfig struct {
	Enabled   []string `config:"enabled" help:"groups of metrics with Hubble's names"`
	Labels    []string `config:"labels" help:"labels of these metrics, as in Hubble's labelsContext"`
	MaxSeries int      `config:"maxSeries" help:"series of these metrics, which tenants share"`
}

func defaults(p instance.Paths) Config {
	return Config{
		StateDir: p.ServiceStateDir("hubble"),
		Datapath: p.Socket("datapath"),
		Identity: p.Socket("identity"),
		Policy:   p.Socket("policy"),
		History:  HistoryConfig{MaxSize: 64 << 20, MaxAge: maxAge, Export: ExportConfig{MaxSize: 10 << 20, Backups: 5}},
		Shares:   shares.DefaultLabels(),
		FlowMetrics: FlowMetricsConfig{
			Enabled: []string{"dns", "drop", "flow", "icmp", "port-distribution", "tcp"}, MaxSeries: 10_000,
		},
	}
}

// maxAge is the maximum age of flows.
const maxAge = 7 * 24 * time.Hour

// Validate reports invalid settings. Package config calls it.
func (c *Config) Validate() error {
	var p config.Problems
	if !filepath.IsAbs(c.StateDir) {
		p.Addf("stateDir", "%q is not an absolute path", c.StateDir)
	}
	if !filepath.IsAbs(c.Datapath) {
		p.Addf("datapath", "%q is not an absolute path", c.Datapath)
	}
	if !filepath.IsAbs(c.Identity) {
		p.Addf("identity", "%q is not an absolute path", c.Identity)
	}
	if !filepath.IsAbs(c.Policy) {
		p.Addf("policy", "%q is not an absolute path", c.Policy)
	}
	c.Listen.validate(&p)
	if c.Page.Address != "" {
		if err := page.Check(c.Page.Address); err != nil {
			p.Addf("page.address", "%v", err)
		}
	}
	if c.History.MaxSize < history.MinBytes {
		p.Addf("history.maxSize", "%s is less than %s", c.History.MaxSize, config.ByteSize(history.MinBytes))
	}
	if c.History.MaxAge <= 0 || c.History.MaxAge > maxAge {
		p.Addf("history.maxAge", "%s is not between 1ns and %s", c.History.MaxAge, maxAge)
	}
	c.History.Export.validate(&p)
	if err := c.metrics().Validate(); err != nil {
		p.Addf("flowMetrics", "%v", err)
	}
	return p.Err()
}

func (l ListenConfig) validate(p *config.Problems) {
	if l.Address == "" {
		return
	}
	for key, address := range map[string]string{"listen.address": l.Address, "listen.advertise": l.Advertise} {
		if _, port, err := net.SplitHostPort(address); key == "listen.address" || address != "" {
			if n, _ := strconv.ParseUint(port, 10, 16); err != nil || n == 0 && port != "0" {
				p.Addf(key, "%q is not host:port", address)
			}
		}
	}
	for key, file := range map[string]string{"cert": l.Cert, "key": l.Key, "clientCA": l.ClientCA} {
		if !filepath.IsAbs(file) {
			p.Addf("listen."+key, "%q is not an absolute path; listen.address requires it", file)
		}
	}
}

// advertised returns the address for peers. If the configuration has no address that other nodes can connect to, it
// returns the socket.
func (l ListenConfig) advertised(socket string) string {
	host, _, _ := net.SplitHostPort(l.Address)
	switch ip, _ := netip.ParseAddr(host); {
	case l.Address != "" && l.Advertise != "":
		return l.Advertise
	case host == "" || ip.IsValid() && ip.IsUnspecified():
		return "unix://" + socket
	}
	return l.Address
}

func (c *Config) metrics() flowmetrics.Options {
	return flowmetrics.Options{
		Names: c.FlowMetrics.Enabled, Labels: c.FlowMetrics.Labels, MaxSeries: c.FlowMetrics.MaxSeries,
	}
}

// Calls returns the system calls that this service needs in addition to the calls that every service needs.
func (c *Config) Calls() sandbox.Calls {
	return sandbox.Calls{Inet: c.Listen.Address != "" || c.Page.Address != ""}
}

// files returns the files that the service opens after startup.
func (c *Config) files() sandbox.Files {
	f := sandbox.Files{Write: []string{c.StateDir}}
	if file := c.History.Export.File; file != "" {
		f.Write = append(f.Write, filepath.Dir(file)) // the directory, because files are renamed
	}
	if c.Listen.Address != "" {
		for _, file := range []string{c.Listen.Cert, c.Listen.Key, c.Listen.ClientCA} {
			f.Read = append(f.Read, filepath.Dir(file)) // the directory, because new files may replace the files
		}
	}
	return f
}
