// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"fmt"
	"go/format"
	"maps"
	"slices"
	"strings"
	"text/template"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// methods are the methods of one service that the plugin calls.
type methods struct {
	service protoreflect.ServiceDescriptor
	names   []protoreflect.Name
}

// use is the part of the API that the plugin uses.
type use struct {
	calls  []methods
	errors []protoreflect.MessageDescriptor // possible details of an error
	// reads names the fields that are read of each message of an answer. An absent message and one with default values
	// are the same to the plugin. With "?" after its name, a field becomes a pointer, which is nil if the field is
	// absent.
	reads map[protoreflect.FullName][]string
}

// The parts of the file.
type (
	constant struct{ Name, Type, Value string }
	enum     struct {
		Name, Proto string
		Values      []constant
	}
	field struct {
		Name, Type, Codec string
		Number            protoreflect.FieldNumber
	}
	message struct {
		Name, Proto string
		Partly      bool // the API's message has more fields
		Fields      []field
	}
	file struct {
		Services, Methods []constant
		Messages          []message
		Enums             []enum
	}
)

// source returns the formatted Go file of the messages. Its error names a message or field in reads that does not
// exist in the API or in any answer, or a message of an answer that is missing in reads.
func (u use) source() ([]byte, error) {
	b := builder{
		use: u, seen: map[protoreflect.FullName]bool{}, asked: map[protoreflect.FullName]bool{},
		enums: map[protoreflect.FullName]bool{},
	}
	var answers []protoreflect.MessageDescriptor
	for _, c := range u.calls {
		b.file.Services = append(b.file.Services, constant{
			Name: string(c.service.Name()), Value: string(c.service.FullName()),
		})
		for _, name := range c.names {
			m := c.service.Methods().ByName(name)
			if m == nil {
				return nil, fmt.Errorf("%s has no method %s", c.service.FullName(), name)
			}
			b.file.Methods = append(b.file.Methods, constant{
				Name: methodName(m), Value: fmt.Sprintf("/%s/%s", c.service.FullName(), name),
			})
			b.ask(m.Input())
			answers = append(answers, m.Output())
		}
	}
	for _, d := range append(answers, u.errors...) {
		if err := b.add(d); err != nil {
			return nil, err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(u.reads)) {
		if !b.seen[name] {
			return nil, fmt.Errorf("no answer has a %s", name)
		}
	}
	slices.SortFunc(b.file.Messages, func(x, y message) int { return strings.Compare(x.Proto, y.Proto) })
	slices.SortFunc(b.file.Enums, func(x, y enum) int { return strings.Compare(x.Proto, y.Proto) })
	var out bytes.Buffer
	if err := layout.Execute(&out, b.file); err != nil {
		return nil, err
	}
	return format.Source(out.Bytes())
}

// methodName returns the name of a method's constant. "Check" alone would be unclear.
func methodName(m protoreflect.MethodDescriptor) string {
	if m.Parent().Name() == "Health" {
		return "Health" + string(m.Name())
	}
	return string(m.Name())
}

type builder struct {
	use
	file  file
	seen  map[protoreflect.FullName]bool
	asked map[protoreflect.FullName]bool // messages in requests: all their fields are written
	enums map[protoreflect.FullName]bool
}

// ask adds a message of a request, and all messages inside it.
func (b *builder) ask(d protoreflect.MessageDescriptor) {
	if b.asked[d.FullName()] {
		return
	}
	b.asked[d.FullName()] = true
	for i := range d.Fields().Len() {
		if m := d.Fields().Get(i).Message(); m != nil {
			b.ask(m)
		}
	}
	b.message(d, func(protoreflect.FieldDescriptor) (use, pointer bool) { return true, true })
}

// add adds a message of an answer, and the messages in the fields that are read.
func (b *builder) add(d protoreflect.MessageDescriptor) error {
	if b.seen[d.FullName()] || b.asked[d.FullName()] {
		return nil
	}
	names, ok := b.reads[d.FullName()]
	if !ok {
		return fmt.Errorf("%s is in an answer, and what is read of it is not listed", d.FullName())
	}
	b.seen[d.FullName()] = true
	present := map[protoreflect.Name]bool{}
	for _, name := range names {
		plain := protoreflect.Name(strings.TrimSuffix(name, "?"))
		fd := d.Fields().ByName(plain)
		if fd == nil {
			return fmt.Errorf("%s has no field %s", d.FullName(), plain)
		}
		present[plain] = plain != protoreflect.Name(name)
		if m := fd.Message(); m != nil && !fd.IsMap() {
			if err := b.add(m); err != nil {
				return err
			}
		}
	}
	b.message(d, func(fd protoreflect.FieldDescriptor) (use, pointer bool) {
		pointer, use = present[fd.Name()]
		return use, pointer
	})
	return nil
}

// message adds a message with the fields that used selects; pointer means that the field's presence is kept.
func (b *builder) message(d protoreflect.MessageDescriptor, used func(protoreflect.FieldDescriptor) (use, pointer bool)) {
	m := message{Name: typeName(d), Proto: string(d.FullName())}
	for i := range d.Fields().Len() {
		fd := d.Fields().Get(i)
		use, pointer := used(fd)
		if !use {
			m.Partly = true
			continue
		}
		f := field{Name: goName(string(fd.Name())), Number: fd.Number()}
		f.Type, f.Codec = b.typeOf(fd, pointer)
		m.Fields = append(m.Fields, f)
	}
	slices.SortFunc(m.Fields, func(x, y field) int { return int(x.Number - y.Number) })
	b.file.Messages = append(b.file.Messages, m)
}

// typeOf returns a field's type in Go, and the name of the codec's function for it.
func (b *builder) typeOf(fd protoreflect.FieldDescriptor, pointer bool) (typ, codec string) {
	switch k := fd.Kind(); {
	case fd.IsMap():
		return "map[string]string", "textMap"
	case k == protoreflect.MessageKind && fd.IsList():
		return "[]*" + typeName(fd.Message()), "many"
	case k == protoreflect.MessageKind && pointer:
		return "*" + typeName(fd.Message()), "one"
	case k == protoreflect.MessageKind:
		return typeName(fd.Message()), "part"
	case k == protoreflect.EnumKind:
		b.enum(fd.Enum())
		typ, codec = typeName(fd.Enum()), "varint"
	case k == protoreflect.BoolKind:
		typ, codec = "bool", "boolean"
	case k == protoreflect.BytesKind:
		typ, codec = "[]byte", "raw"
	case k == protoreflect.StringKind:
		typ, codec = "string", "text"
	default:
		typ, codec = k.String(), "varint" // the compiler refuses types that the codec does not have
	}
	if fd.IsList() {
		return "[]" + typ, codec + "s"
	}
	return typ, codec
}

func (b *builder) enum(d protoreflect.EnumDescriptor) {
	if b.enums[d.FullName()] {
		return
	}
	b.enums[d.FullName()] = true
	e := enum{Name: typeName(d), Proto: string(d.FullName())}
	owner, _ := d.Parent().(protoreflect.MessageDescriptor)
	for i := range d.Values().Len() {
		v := d.Values().Get(i)
		name := goName(strings.ToLower(string(v.Name())))
		if owner != nil && !strings.HasPrefix(name, string(d.Name())) {
			name = typeName(owner) + name
		}
		e.Values = append(e.Values, constant{Name: name, Type: e.Name, Value: fmt.Sprint(v.Number())})
	}
	b.file.Enums = append(b.file.Enums, e)
}

// typeName returns the Go name of a message or enum, with the names of enclosing messages first.
func typeName(d protoreflect.Descriptor) string {
	if owner, ok := d.Parent().(protoreflect.MessageDescriptor); ok {
		return typeName(owner) + string(d.Name())
	}
	return string(d.Name())
}

// initialisms are words that Go does not write with a capital first letter only.
var initialisms = map[string]string{
	"icmp": "ICMP", "icmpv6": "ICMPv6", "id": "ID", "ip": "IP", "ipv4": "IPv4", "ipv6": "IPv6", "mac": "MAC",
	"mtu": "MTU", "sctp": "SCTP", "tcp": "TCP", "udp": "UDP", "uid": "UID", "url": "URL",
}

// goName returns the Go name of a field or value, whose words are separated by underscores.
func goName(name string) string {
	words := strings.Split(name, "_")
	for i, w := range words {
		if initialism, ok := initialisms[w]; ok {
			words[i] = initialism
		} else if w != "" {
			words[i] = strings.ToUpper(w[:1]) + w[1:]
		}
	}
	return strings.Join(words, "")
}

var layout = template.Must(template.New("").Parse(`// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Code generated by the command in generate/. DO NOT EDIT.

package message

// Full names of the services that the plugin calls.
const (
{{- range .Services}}
	{{.Name}} = "{{.Value}}"
{{- end}}
)

// Full names of the methods that the plugin calls.
const (
{{- range .Methods}}
	{{.Name}} = "{{.Value}}"
{{- end}}
)
{{range $e := .Enums}}
// {{.Name}} is {{.Proto}}.
type {{.Name}} int32

// Values of {{.Name}}.
const (
{{- range .Values}}
	{{.Name}} {{.Type}} = {{.Value}}
{{- end}}
)
{{end}}
{{- range .Messages}}
// {{.Name}} is {{.Proto}}{{if .Partly}}, with the fields that the plugin reads{{end}}.
{{- if .Fields}}
type {{.Name}} struct {
{{- range .Fields}}
	{{.Name}} {{.Type}}
{{- end}}
}

func (m *{{.Name}}) fields(f *Fields) {
{{- range .Fields}}
	{{.Codec}}(f, {{.Number}}, &m.{{.Name}})
{{- end}}
}
{{- else}}
type {{.Name}} struct{}

func (*{{.Name}}) fields(*Fields) {}
{{- end}}
{{end -}}
`))
